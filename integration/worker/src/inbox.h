// A thread-safe, bounded queue of input lines, from the thread that reads stdin to the engine.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

#include "protocol.h"

namespace xllm_worker {

class Inbox {
 public:
  // max_queued_requests: most requests that wait to run, here and in the scheduler.
  explicit Inbox(int64_t max_queued_requests) : max_queued_requests_(max_queued_requests) {}

  // Replaces a request by a RefusedLine when too many are queued. Blocks while too many lines wait for the engine:
  // nothing else bounds the number of commands and refused lines. After close() it drops the line.
  void put(InputLine line);
  void close();  // no more lines will come, or be taken

  void wait();  // until there is a line or the end
  std::deque<InputLine> take_all();  // all queued lines

  // The number of requests so far that have left the queue: they run, or were cancelled or refused after take_all().
  void set_num_dequeued(int64_t num_dequeued);

  // Closed and empty.
  bool is_at_end() const;

 private:
  static constexpr size_t kMaxLines = 4096;  // besides requests

  int64_t max_queued_requests_;
  mutable std::mutex mutex_;
  std::condition_variable has_input_;
  std::condition_variable has_room_;
  std::deque<InputLine> lines_;
  int64_t num_requests_ = 0;  // put so far
  int64_t num_dequeued_ = 0;
  bool is_closed_ = false;
};

}  // namespace xllm_worker
