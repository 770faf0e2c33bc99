// What holds the ranks of one model together: rank 0's connection to every other, the frames on it, and the watch that
// ends all of them when one has gone, hangs or fails. It knows no tensors and no Python: it works while those are stuck.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "ranks/socket.h"
#include "step_model.h"

namespace xllm::worker {

enum class FrameType : uint8_t {
  kHello = 1,  // follower: who it is
  kRankInfo,      // follower: what it loaded
  kGo,         // leader: all agree
  kStep,       // leader: a step
  kDone,       // follower: its step is over; a payload says what went wrong
  kAskStats,   // leader
  kStats,      // follower
  kEnd,        // leader: no more steps; follower: it goes
  kAbort,      // either: all must end, and why
  kAlive,      // either, all the time: a sign of life, with the follower's progress
};

struct Frame {
  FrameType type;
  std::string payload;
};

// One frame on a connection that no link watches yet. False, or nullopt, when the other end has gone or takes too long.
bool write_frame(const Socket& socket, FrameType type, std::string_view payload, std::chrono::milliseconds limit);
std::optional<Frame> read_frame(const Socket& socket, std::chrono::milliseconds limit);

// A limit that several waits may share.
struct Deadline {
  Deadline(std::chrono::milliseconds within) : limit(within), at(Clock::now() + within) {}

  std::chrono::milliseconds limit;
  Clock::time_point at;
};

struct LinkOptions {
  std::chrono::milliseconds silence{60000};  // without a sign of life, and of one step, until a rank is given up
  std::chrono::milliseconds grace{3000};     // from a failure until the process ends, whatever it is stuck in
  // What the system knows of a rank that has gone ("killed by signal 9"); may be empty. Called in the link's thread.
  std::function<std::string(int64_t rank)> ending = [](int64_t) { return std::string(); };
};

// Of one process. Rank 0 has a peer for every other rank, those have rank 0.
class RankLink {
 public:
  RankLink(int64_t rank, std::map<int64_t, Socket> peers, LinkOptions options);
  ~RankLink();
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  int64_t rank() const { return rank_; }

  // Throw RankFailure when the ranks cannot go on.
  void send(int64_t peer, FrameType type, std::string_view payload = {});
  void send_all(FrameType type, std::string_view payload = {});
  // The peer's next frame. With a deadline, `what` says what did not happen within its limit.
  Frame receive(int64_t peer, std::optional<Deadline> deadline = std::nullopt, std::string_view what = {});

  // How many collectives this rank has come to, or nothing to ask any more. Called in the link's thread: it tells which
  // rank the others wait for.
  void watch_collectives(std::function<int64_t()> num_collectives);

  // Called in the link's thread with the failure, before it ends a process whose serving thread is stuck; must not take
  // long. Or nothing to call any more: returns when no call is running.
  void set_on_stuck(std::function<void(const std::string& message)> on_stuck);

  // Around each step, so that one that does not end is noticed.
  void begin_step();
  void end_step();

  // Leader, when its own step failed: returns when it failed on all ranks, which can then go on; else throws
  // RankFailure.
  void check_all_failed(const std::string& message);

  // Why the ranks cannot go on; waits up to `wait` for the watch to notice.
  std::optional<std::string> failure(std::chrono::milliseconds wait);

  // Tells the peers that this rank fails, and why.
  void abort(const std::string& message);

 private:
  struct Peer {
    int64_t rank = 0;
    Socket socket;
    std::mutex writing;
    std::string inbound;
    std::deque<Frame> frames;
    Clock::time_point last_heard;
    bool is_open = true;
    bool may_leave = false;  // it has said that it ends
    int64_t num_begun = 0, num_done = 0;          // steps
    int64_t num_collectives = 0;
    std::map<int64_t, std::string> failed_steps;  // number to message
    Clock::time_point failed_at;                  // the last of them
  };

  void watch();
  void read_from(Peer& peer);
  void take(Peer& peer, Frame frame);
  void send_signs_of_life();
  void look_for_silence(Clock::time_point now);
  void look_for_failed_steps(Clock::time_point now);
  void look_for_stuck_steps(Clock::time_point now);
  std::string late_ranks() const;
  void lose(Peer& peer);
  void fail(const std::string& message);
  void tell(const std::string& message);
  bool write(Peer& peer, FrameType type, std::string_view payload);
  Peer& peer(int64_t rank) { return *peers_.at(rank); }

  int64_t rank_;
  LinkOptions options_;
  std::map<int64_t, std::unique_ptr<Peer>> peers_;
  std::atomic<bool> is_aborting_{false};
  std::atomic<bool> is_stopping_{false};

  std::mutex mutex_;  // of all below and of the peers' frames and progress
  std::condition_variable has_news_;
  std::optional<std::string> failure_;
  Clock::time_point failed_at_;
  int64_t num_begun_ = 0, num_done_ = 0;
  Clock::time_point step_began_;
  Clock::time_point last_sign_;
  std::function<int64_t()> num_collectives_ = [] { return 0; };
  std::function<void(const std::string&)> on_stuck_;

  std::thread thread_;
};

}  // namespace xllm::worker
