// The connections between rank 0 and the other ranks, and a watchdog thread that ends all ranks when one dies, hangs or
// fails. Uses no tensors and no Python, so it works while a collective or the interpreter is stuck.
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

namespace xllm_worker {

enum class FrameType : uint8_t {
  kHello = 1,  // follower: its rank and the number of ranks
  kRankInfo,   // follower: its rank info, after loading
  kStart,      // leader: all ranks have equal info
  kStep,       // leader: a step
  kDone,       // follower: end of its step; a payload is an error message
  kAskStats,   // leader
  kStats,      // follower
  kEnd,        // leader: no more steps; follower: it disconnects
  kAbort,      // either: all ranks must end; the reason
  kHeartbeat,  // either: periodic heartbeat, with the number of steps and collectives
};

struct Frame {
  FrameType type;
  std::string payload;
};

// For a connection that no RankLink owns yet. Return false or nullopt when the peer disconnects or `limit` passes, and
// nullopt for a frame of more than `max_payload` bytes.
bool write_frame(const Socket& socket, FrameType type, std::string_view payload, std::chrono::milliseconds limit);
std::optional<Frame> read_frame(const Socket& socket, size_t max_payload, std::chrono::milliseconds limit);

// A time limit that several waits can share.
struct Deadline {
  Deadline(std::chrono::milliseconds within) : limit(within), at(Clock::now() + within) {}

  std::chrono::milliseconds limit;
  Clock::time_point at;
};

struct LinkOptions {
  std::chrono::milliseconds timeout{60000};  // of one step, and between heartbeats of a rank
  std::chrono::milliseconds grace{3000};     // from a failure until the watchdog ends the process
  // How a rank's process exited ("killed by signal 9"); may be empty. Called on the watchdog thread.
  std::function<std::string(int64_t rank)> describe_exit = [](int64_t) { return std::string(); };
};

// The links of one process. Rank 0 has every other rank as a peer; the others have only rank 0.
class RankLink {
 public:
  RankLink(int64_t rank, std::map<int64_t, Socket> peers, LinkOptions options);
  ~RankLink();
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  int64_t rank() const { return rank_; }

  // Throw RankFailure when the ranks cannot continue.
  void send(int64_t peer, FrameType type, std::string_view payload = {});
  void send_all(FrameType type, std::string_view payload = {});
  // Receives the peer's next frame. `what` completes the error message after the deadline: "did not load the model".
  Frame receive(int64_t peer, std::optional<Deadline> deadline = std::nullopt, std::string_view what = {});

  // Sets a function that counts the collectives this rank has started; an empty function removes it. The watchdog thread
  // calls it. The counts show which rank the others wait for.
  void set_collective_counter(std::function<int64_t()> num_collectives);

  // Sets a callback that the watchdog thread calls with the failure before it ends a process whose serving thread is
  // stuck. It must return quickly. An empty function removes it; then returns once no call is running.
  void set_on_stuck(std::function<void(const std::string& message)> on_stuck);

  // Call around each step, so that the watchdog notices a step that does not end.
  void begin_step();
  void end_step();

  // For the leader, after its own step has failed. Returns if the step failed on all ranks, which can then continue;
  // else throws RankFailure.
  void check_all_failed(const std::string& message);

  // The reason why the ranks cannot continue. Waits up to `wait` for the watchdog to find one.
  std::optional<std::string> failure(std::chrono::milliseconds wait);

  // Sends the peers an abort frame with the reason.
  void abort(const std::string& message);

 private:
  struct Peer {
    int64_t rank = 0;
    Socket socket;
    std::mutex writing;
    std::string inbound;
    std::deque<Frame> frames;
    Clock::time_point last_received;
    bool is_open = true;
    bool may_disconnect = false;  // it has sent kEnd
    int64_t num_begun = 0, num_done = 0;          // steps
    int64_t num_collectives = 0;
    std::map<int64_t, std::string> failed_steps;  // number to message
    Clock::time_point failed_at;                  // the time of the last one
  };

  void run_watchdog();
  void read_from(Peer& peer);
  void handle_frame(Peer& peer, Frame frame);
  void send_heartbeats();
  void check_heartbeats(Clock::time_point now);
  void check_failed_steps(Clock::time_point now);
  void check_stuck_step(Clock::time_point now);
  std::string describe_stragglers() const;
  void handle_disconnect(Peer& peer);
  void fail(const std::string& message);
  void send_abort(const std::string& message);
  bool write(Peer& peer, FrameType type, std::string_view payload);
  Peer& peer(int64_t rank) { return *peers_.at(rank); }

  int64_t rank_;
  LinkOptions options_;
  std::map<int64_t, std::unique_ptr<Peer>> peers_;
  std::atomic<bool> is_aborting_{false};
  std::atomic<bool> is_stopping_{false};

  std::mutex mutex_;  // guards all members below, and the peers' frames and progress
  std::condition_variable changed_;
  std::optional<std::string> failure_;
  Clock::time_point failed_at_;
  int64_t num_begun_ = 0, num_done_ = 0;
  Clock::time_point step_began_;
  Clock::time_point last_heartbeat_;
  std::function<int64_t()> num_collectives_ = [] { return 0; };
  std::function<void(const std::string&)> on_stuck_;

  std::thread thread_;
};

}  // namespace xllm_worker
