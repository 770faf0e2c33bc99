#include "interpreter_state.h"

#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <thread>

namespace xllm_executor {

namespace {

enum class State { kNotStarted, kRunning, kShutDown, kExiting };

constexpr std::chrono::seconds kExitGrace{5};

std::atomic<State> g_state{State::kNotStarted};
std::atomic<int> g_active_calls{0};
std::atomic<uint64_t> g_finished_calls{0};
thread_local int t_active_calls = 0;

[[noreturn]] void throw_not_alive(State state) {
  switch (state) {
    case State::kNotStarted:
      throw std::runtime_error("Python is not started: call PythonRuntime::start first");
    case State::kShutDown:
      throw std::runtime_error("Python was shut down by PythonRuntime::shutdown");
    default:
      throw std::runtime_error("the process is exiting: Python takes no more calls");
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
// destruction.
void on_process_exit(int status, void*) {
  if (!stop_for_exit()) {
    std::fflush(nullptr);
    _exit(status);
  }
}

// Exit handlers run in reverse order of registration, and libtorch creates globals lazily during steps. So the handler
// is registered again after 1, 2, 4, 8, ... calls, to run before their destructors. Running it several times is
// harmless.
void register_exit_handler() { on_exit(on_process_exit, nullptr); }

// Returns the state. The call is counted exactly when the state is kRunning.
State begin_call() noexcept {
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
  if (std::has_single_bit(g_finished_calls.fetch_add(1) + 1)) {
    register_exit_handler();
  }
  --t_active_calls;
  g_active_calls.fetch_sub(1);
}

}  // namespace

void start_interpreter_state() {
  g_state.store(State::kRunning);
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
  g_state.store(State::kExiting);
  return wait_for_other_calls(kExitGrace);
}

bool is_alive() noexcept { return g_state.load() == State::kRunning; }

void require_alive() {
  const State state = g_state.load();
  if (state != State::kRunning) {
    throw_not_alive(state);
  }
}

ActiveCall::ActiveCall() {
  const State state = begin_call();
  if (state != State::kRunning) {
    throw_not_alive(state);
  }
}

ActiveCall::~ActiveCall() { end_call(); }

ActiveCleanup::ActiveCleanup() noexcept : allowed_(begin_call() == State::kRunning) {}

ActiveCleanup::~ActiveCleanup() {
  if (allowed_) {
    end_call();
  }
}

}  // namespace xllm_executor
