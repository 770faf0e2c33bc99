#include "line_io.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>

namespace xllm_worker {

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_errno(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

// Waits until `fd` can be written. Throws at the deadline; waits without end if there is none.
void wait_for_room(int fd, const char* name, std::optional<Clock::time_point> deadline) {
  while (true) {
    int left = -1;
    if (deadline) {
      const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(*deadline - Clock::now());
      left = std::max(0, static_cast<int>(time.count()));
    }
    pollfd room{fd, POLLOUT, 0};
    const int num_ready = poll(&room, 1, left);
    if (num_ready > 0) return;
    if (num_ready == 0) throw std::runtime_error(std::string(name) + ": the reader does not read");
    if (errno != EINTR) throw_errno(name);
  }
}

// Writes all of `text`. The descriptor may be non-blocking: another process can set that at any time.
void write_all(int fd, const char* name, std::string_view text, std::optional<std::chrono::milliseconds> limit) {
  std::optional<Clock::time_point> deadline;
  if (limit) deadline = Clock::now() + *limit;
  while (!text.empty()) {
    size_t size = text.size();
    if (deadline) {
      wait_for_room(fd, name, deadline);
      size = std::min<size_t>(size, PIPE_BUF);  // poll() guarantees that much space in a pipe
    }
    const ssize_t num_written = ::write(fd, text.data(), size);
    if (num_written >= 0) {
      text.remove_prefix(static_cast<size_t>(num_written));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_for_room(fd, name, deadline);
    } else if (errno != EINTR) {
      throw_errno(name);
    }
  }
}

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
    // EAGAIN: the input is non-blocking, and another reader was faster.
    if (num_read < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) continue;
    if (num_read < 0) write_log(std::string("stdin: ") + std::strerror(errno) + "; this is the end of the input");
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
  write_all(fd_, "stdout", text, limit);
}

void write_log(std::string line) {
  constexpr std::chrono::milliseconds kLimit{1000};
  static std::atomic<bool> is_full{false};  // then later lines do not wait, so that they delay no step
  line += '\n';
  try {
    write_all(STDERR_FILENO, "stderr", line, is_full ? std::chrono::milliseconds(0) : kLimit);
    is_full = false;
  } catch (const std::exception&) {  // a log that nobody reads is no reason to stop
    is_full = true;
  }
}

void flush_logs() {
  // Only with room: fflush() would wait for the reader, or for a thread that does.
  pollfd room{STDERR_FILENO, POLLOUT, 0};
  if (poll(&room, 1, 0) > 0) std::fflush(nullptr);
}

void open_standard_descriptors() {
  const auto is_closed = [](int fd) { return fcntl(fd, F_GETFD) < 0 && errno == EBADF; };
  const bool has_output = !is_closed(STDOUT_FILENO);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (!is_closed(fd)) continue;
    // In ascending order, so that open() returns this number.
    if (open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY) != fd) throw_errno("/dev/null");
  }
  if (!has_output) throw std::runtime_error("stdout is closed; it must be open for the events");
}

}  // namespace xllm_worker
