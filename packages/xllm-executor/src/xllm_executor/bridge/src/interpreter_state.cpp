#include "interpreter_state.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>

namespace xllm_executor {

namespace {

enum class State { kNotStarted, kRunning, kShutDown, kExiting, kForked };

constexpr std::chrono::seconds kExitGrace{5};

std::atomic<State> g_state{State::kNotStarted};
std::atomic<CallsAtExit> g_calls_at_exit{CallsAtExit::kThrow};
std::atomic<std::thread::id> g_exiting_thread{};
std::atomic<int> g_active_calls{0};
std::atomic<uint64_t> g_finished_calls{0};
thread_local int t_active_calls = 0;

[[noreturn]] void throw_not_alive(State state) {
  switch (state) {
    case State::kNotStarted:
      throw UsageError("Python is not started: call PythonRuntime::start first");
    case State::kShutDown:
      throw InterpreterEnded("Python was shut down by PythonRuntime::shutdown");
    case State::kForked:
      throw InterpreterEnded(
          "this process is a fork of the one that started Python, and has none of its threads: start the process anew "
          "(fork and exec) to use Python in it");
    default:
      throw InterpreterEnded("the process is exiting: Python takes no more calls");
  }
}

// Waits until no other thread is in a call. Returns false when that takes longer than `limit`.
bool wait_for_other_calls(std::optional<std::chrono::seconds> limit) {
  const auto start = std::chrono::steady_clock::now();
  while (g_active_calls.load() > t_active_calls) {
    if (limit.has_value() && std::chrono::steady_clock::now() - start > *limit) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Runs before the destructors of libtorch's globals, which a thread inside a step would otherwise use after
// destruction. In a fork they would wait for threads and locks that are not there.
void on_process_exit(int status, void*) {
  if (g_state.load() == State::kForked || !stop_for_exit()) {
    flush_standard_streams();
    _exit(status);
  }
}

void register_exit_handler() { on_exit(on_process_exit, nullptr); }

// exit() runs handlers and static destructors in reverse order of registration, and libtorch makes statics lazily, in
// calls that may be running now. Only destructors of thread-local objects of the exiting thread run earlier. So this
// thread-local object registers the handler when its thread ends or exits: the handler is then the newest one.
class ExitHook {
 public:
  ~ExitHook() {
    const bool main_thread = gettid() == getpid();  // it ends only by process exit, so that is no leak
    if (g_state.load() == State::kRunning && (main_thread || g_active_calls.load() > t_active_calls)) {
      register_exit_handler();
    }
  }
  void arm() const noexcept {}
};

thread_local const ExitHook t_exit_hook;

// Arms the main thread, or the thread that opens a plugin, even if it never calls the bridge.
[[maybe_unused]] const bool g_armed = [] {
  t_exit_hook.arm();
  return true;
}();

// A fork has only the forking thread. Calls of other threads that were running never end there.
void after_fork_in_child() {
  if (g_state.load() != State::kNotStarted) {
    g_state.store(State::kForked);
    g_active_calls.store(t_active_calls);
  }
}

// Blocks this thread until the process ends. Without the GIL, which the exiting thread may need.
[[noreturn]] void block_until_process_ends() {
  if (holds_gil()) {
    PyEval_SaveThread();
  }
  for (;;) {
    pause();
  }
}

// Returns the state. The call is counted exactly when the state is kRunning.
State begin_call() noexcept {
  t_exit_hook.arm();
  // Count first, then read the state. A thread that stops the interpreter and then waits sees this count, or this call
  // sees the new state.
  g_active_calls.fetch_add(1);
  ++t_active_calls;
  const State state = g_state.load();
  if (state != State::kRunning) {
    --t_active_calls;
    g_active_calls.fetch_sub(1);
  }
  return state;
}

void end_call() noexcept {
  // For an exit from a thread that has no ExitHook: the handler comes before the statics of all calls that have ended
  // by then, after 1, 2, 4, 8, ... calls. Running it several times is harmless.
  if (std::has_single_bit(g_finished_calls.fetch_add(1) + 1)) {
    register_exit_handler();
  }
  --t_active_calls;
  g_active_calls.fetch_sub(1);
}

// Whether the thread runs Python code of a sub-interpreter. PyGILState_Ensure would wait there for the GIL that the
// thread itself holds.
bool in_sub_interpreter() noexcept {
  if (PyInterpreterState_Next(PyInterpreterState_Head()) == nullptr) {
    return false;  // there is only the main interpreter
  }
  const PyThreadState* const current = _PyThreadState_UncheckedGet();
  return current != nullptr && current != PyGILState_GetThisThreadState() &&
         current->thread_id == PyThread_get_thread_ident() && current->interp != PyInterpreterState_Main();
}

}  // namespace

void start_interpreter_state(CallsAtExit calls_at_exit) {
  g_calls_at_exit.store(calls_at_exit);
  g_state.store(State::kRunning);
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  t_exit_hook.arm();
  register_exit_handler();
}

bool stop_interpreter_state() {
  State state = State::kRunning;
  if (g_state.compare_exchange_strong(state, State::kShutDown)) {
    wait_for_other_calls(std::nullopt);
    return true;
  }
  if (state == State::kNotStarted) {
    throw_not_alive(state);
  }
  return false;  // also during process exit: static destructors call shutdown and must not throw
}

bool stop_for_exit() {
  State state = g_state.load();
  do {
    if (state == State::kForked || state == State::kNotStarted) {
      return true;
    }
  } while (!g_state.compare_exchange_weak(state, State::kExiting));
  g_exiting_thread.store(std::this_thread::get_id());
  return wait_for_other_calls(kExitGrace);
}

bool is_alive() noexcept {
  t_exit_hook.arm();
  return g_state.load() == State::kRunning;
}

void require_alive() {
  const State state = g_state.load();
  if (state != State::kRunning) {
    throw_not_alive(state);
  }
}

void refuse_sub_interpreter() {
  if (in_sub_interpreter()) {
    throw UsageError("called from a Python sub-interpreter: the bridge and torch belong to the main interpreter");
  }
}

bool holds_gil() noexcept {
  if (Py_IsInitialized() == 0) {
    return false;
  }
  const PyThreadState* const own = PyGILState_GetThisThreadState();
  return own != nullptr && own == _PyThreadState_UncheckedGet();
}

void flush_standard_streams() noexcept {
  for (std::FILE* const stream : {stdout, stderr}) {
    if (ftrylockfile(stream) == 0) {
      fflush_unlocked(stream);
      funlockfile(stream);
    }
  }
}

ActiveCall::ActiveCall() {
  const State state = begin_call();
  if (state != State::kRunning) {
    if (state == State::kExiting && g_calls_at_exit.load() == CallsAtExit::kBlock &&
        g_exiting_thread.load() != std::this_thread::get_id()) {
      block_until_process_ends();
    }
    throw_not_alive(state);
  }
  try {
    refuse_sub_interpreter();
  } catch (...) {
    end_call();
    throw;
  }
}

ActiveCall::~ActiveCall() { end_call(); }

ActiveCleanup::ActiveCleanup() noexcept : allowed_(begin_call() == State::kRunning) {
  if (allowed_ && in_sub_interpreter()) {  // leaves the object to the process's end
    end_call();
    allowed_ = false;
  }
}

ActiveCleanup::~ActiveCleanup() {
  if (allowed_) {
    end_call();
  }
}

}  // namespace xllm_executor
