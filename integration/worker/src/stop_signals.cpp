#include "stop_signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace xllm_worker {

namespace {

sigset_t stop_set() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

std::string signal_name(int number) { return number == SIGINT ? "SIGINT" : "SIGTERM"; }

StopSignals::StopSignals() {
  const sigset_t set = stop_set();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { wait(); });
}

StopSignals::~StopSignals() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  pthread_kill(thread_.native_handle(), SIGTERM);  // blocked on that thread, so it only wakes sigwait
  thread_.join();
}

void StopSignals::set_handler(Handler handler) {
  const std::lock_guard lock(mutex_);
  handler_ = std::move(handler);
}

int StopSignals::received() const {
  const std::lock_guard lock(mutex_);
  return received_;
}

void StopSignals::wait() {
  const sigset_t set = stop_set();
  for (;;) {
    int number = 0;
    if (sigwait(&set, &number) != 0) continue;
    const std::lock_guard lock(mutex_);
    if (is_ending_) return;
    if (!handler_) {
      std::fprintf(stderr, "stopped by %s\n", signal_name(number).c_str());
      std::fflush(nullptr);
      _exit(128 + number);
    }
    if (received_ == 0) received_ = number;
    handler_(number);
  }
}

}  // namespace xllm_worker
