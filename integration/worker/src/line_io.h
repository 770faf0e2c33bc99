// File descriptors in lines: a thread that reads stdin, and a stdout that nothing else can write to.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <thread>

namespace xllm::worker {

// Calls `on_line` for each line (numbered from 1, line feed removed, blank ones left out) in a thread of its own, then
// `on_end`. The destructor stops the thread even when it waits for input.
class LineReader {
 public:
  using OnLine = std::function<void(std::string_view line, int64_t number)>;
  using OnEnd = std::function<void()>;

  LineReader(int fd, OnLine on_line, OnEnd on_end);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

 private:
  void read_lines();

  int fd_;
  int stop_pipe_[2] = {-1, -1};
  OnLine on_line_;
  OnEnd on_end_;
  std::thread thread_;
};

// Takes stdout for itself: what a library prints to descriptor 1 from now on goes to stderr.
class ProtocolOutput {
 public:
  ProtocolOutput();
  ~ProtocolOutput();
  ProtocolOutput(const ProtocolOutput&) = delete;
  ProtocolOutput& operator=(const ProtocolOutput&) = delete;

  // Throws std::runtime_error when the reader has gone, or has not taken all of it within the limit.
  void write(std::string_view text, std::optional<std::chrono::milliseconds> limit = std::nullopt);

 private:
  void wait_for_room(std::chrono::steady_clock::time_point deadline) const;

  int fd_;
};

}  // namespace xllm::worker
