// TCP between ranks: a listening end, and connections with time limits.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace xllm::worker {

using Clock = std::chrono::steady_clock;

// An owned descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Listens on a free port of the interface that `host` names. Throws std::runtime_error.
std::pair<Socket, int64_t> listen_on(const std::string& host);

// The next connection; an empty socket when none comes within `limit`.
Socket accept_within(const Socket& listener, std::chrono::milliseconds limit);

// Throws std::runtime_error when nobody answers within `limit`.
Socket connect_to(const std::string& host, int64_t port, std::chrono::milliseconds limit);

// Writes everything; false when the other end has gone or takes nothing for `limit`.
bool write_all(const Socket& socket, const std::string& bytes, std::chrono::milliseconds limit);

}  // namespace xllm::worker
