#include "stop_signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <utility>

#include "line_io.h"

namespace xllm_worker {

namespace {

bool is_ignored(int number) {
  struct sigaction action {};
  return sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

sigset_t stop_set() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  // nohup ignores SIGHUP, and the worker must then outlive its terminal. A blocked signal would reach sigwait even so.
  if (!is_ignored(SIGHUP)) sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

std::string signal_name(int number) {
  if (number == SIGHUP) return "SIGHUP";
  return number == SIGINT ? "SIGINT" : "SIGTERM";
}

StopSignals::StopSignals() : set_(stop_set()) {
  pthread_sigmask(SIG_BLOCK, &set_, nullptr);
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
  for (;;) {
    int number = 0;
    if (sigwait(&set_, &number) != 0) continue;
    const std::lock_guard lock(mutex_);
    if (is_ending_) return;
    if (!handler_) {
      write_log("stopped by " + signal_name(number));
      flush_logs();
      _exit(128 + number);
    }
    if (received_ == 0) received_ = number;
    handler_(number);
  }
}

}  // namespace xllm_worker
