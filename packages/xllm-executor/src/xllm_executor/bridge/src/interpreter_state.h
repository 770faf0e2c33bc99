// Internal: tracks whether Python may be called, and counts running calls so that shutdown and exit can wait for them.
#pragma once

#include "xllm_executor/python_runtime.h"

namespace xllm_executor {

// Allows calls into Python until stop_interpreter_state, process exit, or a fork. Called once.
void start_interpreter_state(CallsAtExit calls_at_exit);

// Refuses new calls and waits until no other thread is in a call. Returns false if calls were refused already, by an
// earlier stop or by process exit. Throws UsageError before start_interpreter_state.
bool stop_interpreter_state();

// Refuses or blocks new calls and waits until no other thread is in a call. Returns false after a few seconds of
// waiting. For process exit, and for the finalisation of a joined interpreter.
[[nodiscard]] bool stop_for_exit();

// Also makes an exit from this thread safe, as every call does.
[[nodiscard]] bool is_alive() noexcept;

// Throws UsageError or InterpreterEnded with the reason when Python may not be called.
void require_alive();

// Throws UsageError when the thread runs code of a Python sub-interpreter.
void refuse_sub_interpreter();

// Whether this thread holds the GIL. Unlike PyGILState_Check it is exact when the process has sub-interpreters.
[[nodiscard]] bool holds_gil() noexcept;

// Writes buffered output of stdout and stderr. It waits for no other thread, which may hold a stream's lock.
void flush_standard_streams() noexcept;

// Scope of one call into Python, which is counted. Throws as require_alive does, and counts nothing then. Also throws
// UsageError in a Python sub-interpreter: torch and this bridge belong to the main interpreter.
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
