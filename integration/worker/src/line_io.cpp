#include "line_io.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <stdexcept>
#include <string>
#include <system_error>

namespace xllm_worker {

namespace {

[[noreturn]] void throw_errno(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

}  // namespace

LineReader::LineReader(int fd, size_t max_bytes, OnLine on_line, OnLongLine on_long_line, OnEnd on_end)
    : fd_(fd),
      max_bytes_(max_bytes),
      on_line_(std::move(on_line)),
      on_long_line_(std::move(on_long_line)),
      on_end_(std::move(on_end)) {
  if (pipe2(stop_pipe_, O_CLOEXEC) != 0) throw_errno("pipe");
  thread_ = std::thread([this] { read_lines(); });
}

LineReader::~LineReader() {
  close(stop_pipe_[1]);
  thread_.join();
  close(stop_pipe_[0]);
}

void LineReader::read_lines() {
  std::array<char, 1 << 16> chunk;
  while (true) {
    pollfd ready[2] = {{fd_, POLLIN, 0}, {stop_pipe_[0], POLLIN, 0}};
    if (poll(ready, 2, -1) < 0 && errno == EINTR) continue;
    if (ready[1].revents != 0) return;
    const ssize_t num_read = read(fd_, chunk.data(), chunk.size());
    if (num_read < 0 && errno == EINTR) continue;
    if (num_read <= 0) break;
    split({chunk.data(), static_cast<size_t>(num_read)});
  }
  end_line();
  on_end_();
}

void LineReader::split(std::string_view chunk) {
  for (size_t end; (end = chunk.find('\n')) != std::string_view::npos; chunk.remove_prefix(end + 1)) {
    append(chunk.substr(0, end));
    end_line();
  }
  append(chunk);
}

void LineReader::append(std::string_view part) {
  if (is_too_long_) return;
  is_too_long_ = part.size() > max_bytes_ - line_.size();
  if (!is_too_long_) {
    line_.append(part);
    return;
  }
  line_.clear();
  on_long_line_(number_);
}

void LineReader::end_line() {
  if (!is_too_long_ && !is_blank(line_)) on_line_(line_, number_);
  line_.clear();
  is_too_long_ = false;
  ++number_;
}

ProtocolOutput::ProtocolOutput() {
  std::signal(SIGPIPE, SIG_IGN);  // write() then fails with EPIPE instead of killing the process
  fd_ = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
  if (fd_ < 0) throw_errno("stdout");
  if (dup2(STDERR_FILENO, STDOUT_FILENO) < 0) throw_errno("stdout");
}

ProtocolOutput::~ProtocolOutput() { close(fd_); }

void ProtocolOutput::write(std::string_view text, std::optional<std::chrono::milliseconds> limit) {
  const auto begin = std::chrono::steady_clock::now();
  while (!text.empty()) {
    size_t size = text.size();
    if (limit) {
      wait_for_room(begin + *limit);
      size = std::min<size_t>(size, PIPE_BUF);  // poll() guarantees that much space in a pipe
    }
    const ssize_t num_written = ::write(fd_, text.data(), size);
    if (num_written < 0 && errno == EINTR) continue;
    if (num_written < 0) throw_errno("stdout");
    text.remove_prefix(static_cast<size_t>(num_written));
  }
}

void ProtocolOutput::wait_for_room(std::chrono::steady_clock::time_point deadline) const {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd room{fd_, POLLOUT, 0};
    const int num_ready = poll(&room, 1, std::max(0, static_cast<int>(left.count())));
    if (num_ready > 0) return;
    if (num_ready == 0) throw std::runtime_error("stdout: the reader does not read");
    if (errno != EINTR) throw_errno("stdout");
  }
}

}  // namespace xllm_worker
