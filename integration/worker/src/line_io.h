// Line-based I/O: a reader thread for stdin, a private stdout that libraries cannot write to, and log lines on stderr.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace xllm_worker {

// Starts a thread that calls `on_line` for each line, then `on_end`. Lines are numbered from 1 and passed without line
// feed; blank lines are skipped. For a line with more than `max_bytes` bytes it calls `on_long_line` instead, as soon
// as the limit is passed, and discards the rest of the line. The destructor stops the thread even while it waits for
// input.
class LineReader {
 public:
  using OnLine = std::function<void(std::string_view line, int64_t number)>;
  using OnLongLine = std::function<void(int64_t number)>;
  using OnEnd = std::function<void()>;

  LineReader(int fd, size_t max_bytes, OnLine on_line, OnLongLine on_long_line, OnEnd on_end);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

 private:
  void read_lines();
  void split(std::string_view chunk);
  void append(std::string_view part);
  void end_line();

  int fd_;
  size_t max_bytes_;
  int stop_pipe_[2] = {-1, -1};
  OnLine on_line_;
  OnLongLine on_long_line_;
  OnEnd on_end_;
  std::string line_;          // the bytes of the current line so far; empty once it is too long
  bool is_too_long_ = false;  // the current line
  int64_t number_ = 1;        // of the current line
  std::thread thread_;
};

// Owns stdout. Redirects descriptor 1 to stderr, so that the output of libraries cannot mix with events.
class ProtocolOutput {
 public:
  ProtocolOutput();
  ~ProtocolOutput();
  ProtocolOutput(const ProtocolOutput&) = delete;
  ProtocolOutput& operator=(const ProtocolOutput&) = delete;

  // Waits while the reader reads slowly, with a non-blocking descriptor too. Throws std::runtime_error when the reader
  // has closed the pipe, or has not read everything within the limit.
  void write(std::string_view text, std::optional<std::chrono::milliseconds> limit = std::nullopt);

 private:
  int fd_;
};

// Writes a line to stderr in one call, since several ranks share it. Drops the line when stderr has no room within one
// second, and later lines at once until there is room: a full stderr must not stop the worker.
void write_log(std::string line);

// Flushes the output of libraries before _exit(), unless stderr has no room.
void flush_logs();

// Call first in main. Opens /dev/null for each closed descriptor of 0, 1 and 2: the next file that is opened would get
// its number, and with it the output of libraries. Throws std::runtime_error if stdout was closed.
void open_standard_descriptors();

}  // namespace xllm_worker
