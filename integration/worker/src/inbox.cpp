#include "inbox.h"

#include <utility>

namespace xllm::worker {

void Inbox::put(InputLine line) {
  {
    const std::lock_guard lock(mutex_);
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
}

void Inbox::wait() {
  std::unique_lock lock(mutex_);
  has_input_.wait(lock, [this] { return !lines_.empty() || is_closed_; });
}

std::deque<InputLine> Inbox::take_all() {
  const std::lock_guard lock(mutex_);
  return std::exchange(lines_, {});
}

bool Inbox::is_at_end() const {
  const std::lock_guard lock(mutex_);
  return is_closed_ && lines_.empty();
}

}  // namespace xllm::worker
