// Internal: tracks whether Python may be called, and counts running calls so that shutdown and exit can wait for them.
#pragma once

namespace xllm_executor {

// Allows calls into Python until stop_interpreter_state or process exit. Called once.
void start_interpreter_state();

// Refuses new calls and waits until no other thread is in a call. Returns false if calls were refused already, by an
// earlier stop or by process exit. Throws std::runtime_error before start_interpreter_state.
bool stop_interpreter_state();

// Refuses new calls and waits until no other thread is in a call. Returns false after a few seconds of waiting. For
// process exit, and for the finalisation of a joined interpreter.
[[nodiscard]] bool stop_for_exit();

[[nodiscard]] bool is_alive() noexcept;

// Throws std::runtime_error with the reason when Python may not be called.
void require_alive();

// Scope of one call into Python, which is counted. Throws as require_alive does, and counts nothing then.
class ActiveCall {
 public:
  ActiveCall();
  ~ActiveCall();
  ActiveCall(const ActiveCall&) = delete;
  ActiveCall& operator=(const ActiveCall&) = delete;
};

// As ActiveCall, for destructors: converts to false when Python may not be called. Shutdown and exit wait for these
// too, since freeing a Python object may run library code.
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

}  // namespace xllm_executor
