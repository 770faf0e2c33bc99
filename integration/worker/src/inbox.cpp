#include "inbox.h"

#include <string>
#include <utility>

namespace xllm_worker {

void Inbox::put(InputLine line) {
  {
    std::unique_lock lock(mutex_);
    const size_t max_lines = kMaxLines + static_cast<size_t>(max_queued_requests_);
    has_room_.wait(lock, [&] { return lines_.size() < max_lines || is_closed_; });
    if (is_closed_) return;
    if (const auto* request = std::get_if<Request>(&line.content)) {
      if (num_requests_ - num_dequeued_ < max_queued_requests_) {
        ++num_requests_;
      } else {
        line.content = RefusedLine{request->id,
                                   "the queue is full: " + std::to_string(max_queued_requests_) +
                                       " requests wait already, the limit of --max_queued_requests",
                                   kQueueFull};
      }
    }
    lines_.push_back(std::move(line));
  }
  has_input_.notify_one();
}

void Inbox::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  has_input_.notify_one();
  has_room_.notify_one();
}

void Inbox::wait() {
  std::unique_lock lock(mutex_);
  has_input_.wait(lock, [this] { return !lines_.empty() || is_closed_; });
}

std::deque<InputLine> Inbox::take_all() {
  std::deque<InputLine> lines;
  {
    const std::lock_guard lock(mutex_);
    lines = std::exchange(lines_, {});
  }
  has_room_.notify_one();
  return lines;
}

void Inbox::set_num_dequeued(int64_t num_dequeued) {
  const std::lock_guard lock(mutex_);
  num_dequeued_ = num_dequeued;
}

bool Inbox::is_at_end() const {
  const std::lock_guard lock(mutex_);
  return is_closed_ && lines_.empty();
}

}  // namespace xllm_worker
