#include "ranks/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "line_io.h"

namespace xllm_worker {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPollInterval{100};
constexpr milliseconds kHeartbeatInterval{500};
constexpr milliseconds kAbortLimit{200};  // to write an abort frame to a rank that may be stuck
constexpr size_t kHeaderSize = 1 + sizeof(uint64_t);
constexpr uint64_t kMaxPayload = uint64_t{1} << 30;  // bytes; the largest frames are steps, of at most 2^24 tokens

struct Heartbeat {
  int64_t num_begun = 0;  // steps
  int64_t num_collectives = 0;
};

std::string header(FrameType type, size_t size) {
  std::string text(kHeaderSize, '\0');
  text[0] = static_cast<char>(type);
  const uint64_t length = size;
  std::memcpy(text.data() + 1, &length, sizeof(length));
  return text;
}

// The payload size of the first frame; 0 while its header is incomplete.
uint64_t payload_size(const std::string& bytes) {
  uint64_t length = 0;
  if (bytes.size() >= kHeaderSize) std::memcpy(&length, bytes.data() + 1, sizeof(length));
  return length;
}

// Removes the first complete frame from the bytes and returns it.
std::optional<Frame> next_frame(std::string& bytes) {
  const uint64_t length = payload_size(bytes);
  if (bytes.size() < kHeaderSize || bytes.size() - kHeaderSize < length) return std::nullopt;
  Frame frame{static_cast<FrameType>(bytes[0]), bytes.substr(kHeaderSize, length)};
  bytes.erase(0, kHeaderSize + length);
  return frame;
}

// Does not block: a heartbeat that does not fit into the socket's buffer is dropped. A partly sent one must be
// completed.
void send_heartbeat(const Socket& socket, const std::string& bytes, milliseconds limit) {
  const ssize_t count = ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count > 0 && static_cast<size_t>(count) < bytes.size()) {
    write_all(socket, bytes.substr(static_cast<size_t>(count)), limit);
  }
}

std::string rank_name(int64_t rank) { return "rank " + std::to_string(rank); }

std::string seconds(milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", static_cast<double>(time.count()) / 1000);
  return text;
}

}  // namespace

bool write_frame(const Socket& socket, FrameType type, std::string_view payload, milliseconds limit) {
  std::string bytes = header(type, payload.size());
  bytes.append(payload);
  return write_all(socket, bytes, limit);
}

std::optional<Frame> read_frame(const Socket& socket, size_t max_payload, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  std::string bytes;
  while (true) {
    if (payload_size(bytes) > max_payload) return std::nullopt;
    if (std::optional<Frame> frame = next_frame(bytes)) return frame;
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    pollfd entry{socket.fd(), POLLIN, 0};
    if (left.count() <= 0 || poll(&entry, 1, static_cast<int>(left.count())) <= 0) return std::nullopt;
    char byte = 0;  // byte by byte: the bytes after this frame belong to the RankLink
    if (recv(socket.fd(), &byte, 1, 0) != 1) return std::nullopt;
    bytes.push_back(byte);
  }
}

RankLink::RankLink(int64_t rank, std::map<int64_t, Socket> peers, LinkOptions options)
    : rank_(rank), options_(std::move(options)) {
  for (auto& [peer_rank, socket] : peers) {
    auto peer = std::make_unique<Peer>();
    peer->rank = peer_rank;
    peer->socket = std::move(socket);
    peer->last_received = Clock::now();
    peers_.emplace(peer_rank, std::move(peer));
  }
  last_heartbeat_ = Clock::now();
  thread_ = std::thread([this] { run_watchdog(); });
}

RankLink::~RankLink() {
  is_stopping_ = true;
  thread_.join();
}

void RankLink::send(int64_t to, FrameType type, std::string_view payload) {
  if (write(peer(to), type, payload)) return;
  // The watchdog notices it too, and has a better message.
  throw RankFailure(failure(options_.grace).value_or(rank_name(to) + " does not read its connection"));
}

void RankLink::send_all(FrameType type, std::string_view payload) {
  for (const auto& [rank, peer] : peers_) send(rank, type, payload);
}

bool RankLink::write(Peer& to, FrameType type, std::string_view payload) {
  const std::lock_guard lock(to.writing);
  return write_frame(to.socket, type, payload, options_.timeout);
}

Frame RankLink::receive(int64_t from, std::optional<Deadline> deadline, std::string_view what) {
  Peer& source = peer(from);
  std::unique_lock lock(mutex_);
  const auto has_changed = [&] { return failure_ || !source.frames.empty(); };
  if (deadline) {
    if (!changed_.wait_until(lock, deadline->at, has_changed)) {
      throw RankFailure(rank_name(from) + " " + std::string(what) + " within " + seconds(deadline->limit));
    }
  } else {
    changed_.wait(lock, has_changed);
  }
  if (source.frames.empty()) throw RankFailure(*failure_);
  Frame frame = std::move(source.frames.front());
  source.frames.pop_front();
  return frame;
}

void RankLink::set_collective_counter(std::function<int64_t()> num_collectives) {
  const std::lock_guard lock(mutex_);
  if (num_collectives) {
    num_collectives_ = std::move(num_collectives);
  } else {
    num_collectives_ = [] { return 0; };
  }
}

void RankLink::set_on_stuck(std::function<void(const std::string& message)> on_stuck) {
  const std::lock_guard lock(mutex_);
  on_stuck_ = std::move(on_stuck);
}

void RankLink::begin_step() {
  const std::lock_guard lock(mutex_);
  if (failure_) throw RankFailure(*failure_);
  for (const auto& [rank, peer] : peers_) {
    // The step succeeded here and failed there, so the KV caches differ from now on.
    if (peer->failed_steps.empty()) continue;
    const auto& [number, message] = *peer->failed_steps.begin();
    throw RankFailure(rank_name(rank) + " failed in step " + std::to_string(number) + ": " + message);
  }
  ++num_begun_;
  step_began_ = Clock::now();
}

void RankLink::end_step() {
  const std::lock_guard lock(mutex_);
  num_done_ = num_begun_;
}

void RankLink::check_all_failed(const std::string& message) {
  std::unique_lock lock(mutex_);
  const int64_t step = num_begun_;
  for (const auto& [rank, peer] : peers_) {
    changed_.wait_for(lock, options_.grace, [&] { return failure_ || peer->num_done >= step; });
    if (failure_) throw RankFailure(*failure_);
    if (peer->failed_steps.erase(step) == 0) {
      throw RankFailure(rank_name(rank_) + " failed in step " + std::to_string(step) + ", " + rank_name(rank) +
                        " did not: " + message);
    }
  }
}

std::optional<std::string> RankLink::failure(milliseconds wait) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, wait, [&] { return failure_.has_value(); });
  return failure_;
}

void RankLink::abort(const std::string& message) {
  is_aborting_ = true;
  send_abort(message);
}

void RankLink::send_abort(const std::string& message) {
  for (const auto& [rank, peer] : peers_) {
    const std::unique_lock lock(peer->writing, std::try_to_lock);
    if (lock) write_frame(peer->socket, FrameType::kAbort, message, kAbortLimit);
  }
}

void RankLink::run_watchdog() {
  while (!is_stopping_) {
    std::vector<Peer*> open;
    std::vector<pollfd> entries;
    for (const auto& [rank, peer] : peers_) {
      if (!peer->is_open) continue;
      open.push_back(peer.get());
      entries.push_back({peer->socket.fd(), POLLIN, 0});
    }
    poll(entries.data(), entries.size(), static_cast<int>(kPollInterval.count()));
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].revents != 0) read_from(*open[i]);
    }
    const auto now = Clock::now();
    if (now - last_heartbeat_ >= kHeartbeatInterval) send_heartbeats();
    const std::unique_lock lock(mutex_);
    check_heartbeats(now);
    check_failed_steps(now);
    check_stuck_step(now);
    if (failure_ && now - failed_at_ > options_.grace) {
      // The serving thread is stuck in a collective with the lost rank, or waits for input.
      if (on_stuck_) on_stuck_(*failure_);
      write_log("error: " + *failure_);
      flush_logs();
      _exit(1);
    }
  }
}

void RankLink::read_from(Peer& from) {
  std::array<char, 1 << 16> chunk;
  const ssize_t count = recv(from.socket.fd(), chunk.data(), chunk.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  const std::unique_lock lock(mutex_);
  if (count <= 0) {
    from.is_open = false;
    handle_disconnect(from);
    return;
  }
  from.last_received = Clock::now();
  from.inbound.append(chunk.data(), static_cast<size_t>(count));
  while (std::optional<Frame> frame = next_frame(from.inbound)) handle_frame(from, std::move(*frame));
  if (const uint64_t size = payload_size(from.inbound); size > kMaxPayload) {
    from.is_open = false;
    fail(rank_name(from.rank) + " sent a frame of " + std::to_string(size) + " bytes; the limit is " +
         std::to_string(kMaxPayload));
  }
}

void RankLink::handle_frame(Peer& from, Frame frame) {
  switch (frame.type) {
    case FrameType::kHeartbeat: {
      Heartbeat heartbeat;
      std::memcpy(&heartbeat, frame.payload.data(), std::min(sizeof(heartbeat), frame.payload.size()));
      from.num_begun = heartbeat.num_begun;
      from.num_collectives = heartbeat.num_collectives;
      return;
    }
    case FrameType::kDone:
      from.num_begun = from.num_done = from.num_done + 1;
      if (!frame.payload.empty()) {
        from.failed_steps[from.num_done] = frame.payload;
        from.failed_at = from.last_received;
      }
      break;
    case FrameType::kAbort:
      fail(frame.payload);
      return;
    default:
      from.may_disconnect = from.may_disconnect || frame.type == FrameType::kEnd;
      from.frames.push_back(std::move(frame));
  }
  changed_.notify_all();
}

void RankLink::send_heartbeats() {
  last_heartbeat_ = Clock::now();
  Heartbeat heartbeat;
  {
    const std::lock_guard lock(mutex_);
    heartbeat = {num_begun_, num_collectives_()};
  }
  std::string bytes = header(FrameType::kHeartbeat, sizeof(heartbeat));
  bytes.append(reinterpret_cast<const char*>(&heartbeat), sizeof(heartbeat));
  for (const auto& [rank, peer] : peers_) {
    const std::unique_lock lock(peer->writing, std::try_to_lock);
    // If another thread is writing to this peer, that frame counts as a heartbeat.
    if (peer->is_open && lock) send_heartbeat(peer->socket, bytes, kPollInterval);
  }
}

void RankLink::check_heartbeats(Clock::time_point now) {
  for (const auto& [rank, peer] : peers_) {
    if (peer->is_open && !peer->may_disconnect && !is_aborting_ && now - peer->last_received > options_.timeout) {
      fail(rank_name(rank) + " sent no heartbeat for " + seconds(options_.timeout));
    }
  }
}

// check_all_failed removes a step that failed on all ranks.
void RankLink::check_failed_steps(Clock::time_point now) {
  for (const auto& [rank, peer] : peers_) {
    if (peer->failed_steps.empty() || now - peer->failed_at <= options_.grace) continue;
    const auto& [number, message] = *peer->failed_steps.begin();
    fail(rank_name(rank) + " failed in step " + std::to_string(number) + ": " + message);
  }
}

void RankLink::check_stuck_step(Clock::time_point now) {
  if (rank_ != 0 || num_done_ == num_begun_) return;
  if (now - step_began_ <= options_.timeout) return;
  fail("step " + std::to_string(num_begun_) + " did not end within " + seconds(options_.timeout) + ": " +
       describe_stragglers());
}

// Names the ranks that have made less progress than the others.
std::string RankLink::describe_stragglers() const {
  std::map<int64_t, std::pair<int64_t, int64_t>> progress = {{rank_, {num_begun_, num_collectives_()}}};
  for (const auto& [rank, peer] : peers_) progress[rank] = {peer->num_begun, peer->num_collectives};
  const auto first = std::max_element(
      progress.begin(), progress.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string late;
  for (const auto& [rank, reached] : progress) {
    if (reached < first->second) late += (late.empty() ? "rank " : ", ") + std::to_string(rank);
  }
  if (late.empty()) return "all ranks have reached the same collective";
  return late + " did not reach the collective where the others wait";
}

void RankLink::handle_disconnect(Peer& lost) {
  if (lost.may_disconnect || is_aborting_) return;
  std::string how;
  // The exit status is available a little later than the end of the connection.
  for (int i = 0; i < 20 && how.empty(); ++i) {
    how = options_.describe_exit(lost.rank);
    if (how.empty()) std::this_thread::sleep_for(milliseconds(10));
  }
  fail(rank_name(lost.rank) + " is gone: " + (how.empty() ? "its connection closed" : how));
}

void RankLink::fail(const std::string& message) {
  if (failure_) return;
  failure_ = message;
  failed_at_ = Clock::now();
  changed_.notify_all();
  if (rank_ == 0) send_abort(message);
}

}  // namespace xllm_worker
