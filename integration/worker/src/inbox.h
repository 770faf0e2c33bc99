// A thread-safe queue of input lines, from the thread that reads stdin to the engine.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "protocol.h"

namespace xllm::worker {

class Inbox {
 public:
  void put(InputLine line);
  void close();  // no more lines will come

  void wait();  // until there is a line or the end
  std::deque<InputLine> take_all();  // all queued lines

  // Closed and empty.
  bool is_at_end() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable has_input_;
  std::deque<InputLine> lines_;
  bool is_closed_ = false;
};

}  // namespace xllm::worker
