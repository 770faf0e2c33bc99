// TCP sockets between ranks, with time limits on accept, connect and write.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace xllm_worker {

using Clock = std::chrono::steady_clock;

// Owns a file descriptor.
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

// Accepts the next connection. Returns an empty socket when none arrives within `limit`.
Socket accept_within(const Socket& listener, std::chrono::milliseconds limit);

// Retries until `limit`, then throws std::runtime_error.
Socket connect_to(const std::string& host, int64_t port, std::chrono::milliseconds limit);

// Writes all bytes. Returns false when the peer has closed the connection or reads nothing for `limit`.
bool write_all(const Socket& socket, const std::string& bytes, std::chrono::milliseconds limit);

}  // namespace xllm_worker
