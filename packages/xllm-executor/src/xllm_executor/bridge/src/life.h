// Internal: when Python may be called. Counts the calls that threads are in, so that shutdown and exit can wait for them.
#pragma once

namespace xllm::executor {

// Python may be called from now on, until end_life or the exit of the process. Once.
void begin_life();

// Refuses calls from now on and waits until no other thread is in one; false when life had ended before, be it by the
// exit of the process. Throws std::runtime_error before begin_life.
bool end_life();

// Refuses calls from now on and waits until no other thread is in one; false when that takes longer than a few seconds.
// What a process does at its exit, and an interpreter that it finalises before.
[[nodiscard]] bool begin_exit();

[[nodiscard]] bool is_alive() noexcept;

// Throws std::runtime_error, saying why, when Python may not be called.
void require_life();

// One call into Python. Throws as require_life does, without counting.
class ActiveCall {
 public:
  ActiveCall();
  ~ActiveCall();
  ActiveCall(const ActiveCall&) = delete;
  ActiveCall& operator=(const ActiveCall&) = delete;
};

// As ActiveCall, for destructors: false where Python may not be called. Shutdown and exit wait for these too, since
// freeing what Python holds runs code of libraries.
class ActiveCleanup {
 public:
  ActiveCleanup() noexcept;
  ~ActiveCleanup();
  ActiveCleanup(const ActiveCleanup&) = delete;
  ActiveCleanup& operator=(const ActiveCleanup&) = delete;

  explicit operator bool() const noexcept { return allowed_; }

 private:
  bool allowed_;
};

}  // namespace xllm::executor
