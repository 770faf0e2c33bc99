#include "life.h"

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

namespace xllm::executor {

namespace {

enum class State { kNotStarted, kRunning, kShutDown, kExiting };

constexpr std::chrono::seconds kExitGrace{5};

std::atomic<State> g_state{State::kNotStarted};
std::atomic<int> g_active_calls{0};
std::atomic<uint64_t> g_finished_calls{0};
thread_local int t_active_calls = 0;

[[noreturn]] void refuse(State state) {
  switch (state) {
    case State::kNotStarted:
      throw std::runtime_error("Python is not started: call PythonRuntime::start first");
    case State::kShutDown:
      throw std::runtime_error("Python was shut down by PythonRuntime::shutdown");
    default:
      throw std::runtime_error("the process is exiting: Python takes no more calls");
  }
}

// Waits until no other thread is in a call; false when that takes longer than `limit`.
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

// Must run before the destructors of libtorch's globals: a thread that is in a step must not run into those.
void on_process_exit(int status, void*) {
  if (!begin_exit()) {
    std::fflush(nullptr);
    _exit(status);
  }
}

// What is registered last runs first at exit, and libtorch makes globals as steps first need them. So the handler is
// registered again after 1, 2, 4, 8, ... calls, to stay ahead of them; it does the same however often it runs.
void register_exit_handler() { on_exit(on_process_exit, nullptr); }

// The state, in which kRunning means that the call counts.
State begin_call() noexcept {
  // Counted before the state is read: whoever changes the state and then waits sees either the count or the refusal.
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

void begin_life() {
  g_state.store(State::kRunning);
  register_exit_handler();
}

bool end_life() {
  State state = State::kRunning;
  if (g_state.compare_exchange_strong(state, State::kShutDown)) {
    wait_for_other_calls(std::nullopt);
    return true;
  }
  if (state == State::kNotStarted) {
    refuse(state);
  }
  return false;  // while the process exits too: static destructors shut down, and must not throw
}

bool begin_exit() {
  g_state.store(State::kExiting);
  return wait_for_other_calls(kExitGrace);
}

bool is_alive() noexcept { return g_state.load() == State::kRunning; }

void require_life() {
  const State state = g_state.load();
  if (state != State::kRunning) {
    refuse(state);
  }
}

ActiveCall::ActiveCall() {
  const State state = begin_call();
  if (state != State::kRunning) {
    refuse(state);
  }
}

ActiveCall::~ActiveCall() { end_call(); }

ActiveCleanup::ActiveCleanup() noexcept : allowed_(begin_call() == State::kRunning) {}

ActiveCleanup::~ActiveCleanup() {
  if (allowed_) {
    end_call();
  }
}

}  // namespace xllm::executor
