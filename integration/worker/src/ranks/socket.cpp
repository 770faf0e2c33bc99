#include "ranks/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

namespace xllm_worker {

namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, int64_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) throw std::runtime_error("host " + host + " cannot be resolved: " + gai_strerror(error));
  return {found, &freeaddrinfo};
}

void prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // sends small step frames at once
}

bool wait_for(int fd, short events, std::chrono::milliseconds limit) {
  pollfd entry{fd, events, 0};
  return poll(&entry, 1, static_cast<int>(limit.count())) > 0;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

std::pair<Socket, int64_t> listen_on(const std::string& host) {
  const Addresses addresses = resolve(host, 0, AI_PASSIVE);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket(::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol));
    if (!socket || bind(socket.fd(), address->ai_addr, address->ai_addrlen) != 0 || listen(socket.fd(), 128) != 0) {
      continue;
    }
    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&bound), &length);
    const in_port_t port = bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                       : reinterpret_cast<sockaddr_in&>(bound).sin_port;
    return {std::move(socket), ntohs(port)};
  }
  throw std::runtime_error("cannot listen on " + host + ": " + std::strerror(errno));
}

Socket accept_within(const Socket& listener, std::chrono::milliseconds limit) {
  if (!wait_for(listener.fd(), POLLIN, limit)) return {};
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket) prepare(socket.fd());
  return socket;
}

Socket connect_to(const std::string& host, int64_t port, std::chrono::milliseconds limit) {
  const Addresses addresses = resolve(host, port, 0);
  const auto deadline = Clock::now() + limit;
  std::string problem = "no answer";
  do {
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
      Socket socket(::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol));
      if (socket && connect(socket.fd(), address->ai_addr, address->ai_addrlen) == 0) {
        prepare(socket.fd());
        return socket;
      }
      problem = std::strerror(errno);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (Clock::now() < deadline);
  throw std::runtime_error("cannot connect to " + host + ":" + std::to_string(port) + ": " + problem);
}

bool write_all(const Socket& socket, const std::string& bytes, std::chrono::milliseconds limit) {
  size_t begin = 0;
  while (begin < bytes.size()) {
    if (!wait_for(socket.fd(), POLLOUT, limit)) return false;
    const ssize_t count = send(socket.fd(), bytes.data() + begin, bytes.size() - begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (count > 0) begin += static_cast<size_t>(count);
  }
  return true;
}

}  // namespace xllm_worker
