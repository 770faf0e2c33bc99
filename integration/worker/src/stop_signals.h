// Handles SIGINT, SIGTERM and SIGHUP on a separate thread, so that the worker can report its unfinished requests.
#pragma once

#include <signal.h>

#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace xllm_worker {

// "SIGINT", "SIGTERM" or "SIGHUP".
std::string signal_name(int number);

// Blocks these signals on the calling thread and on all threads started later, and waits for them on its own thread.
// SIGHUP stays ignored if it was ignored at the start, as nohup does. SIGQUIT keeps its default, a core dump.
// Without a handler, a signal ends the process at once with exit code 128 + number and a line on stderr.
class StopSignals {
 public:
  using Handler = std::function<void(int number)>;

  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Sets the handler, which runs on the signal thread. An empty handler restores the default, which ends the process.
  // Returns once no call of the old handler is running.
  void set_handler(Handler handler);

  // The first signal received; 0 if none.
  [[nodiscard]] int received() const;

 private:
  void wait();

  sigset_t set_;  // constant
  mutable std::mutex mutex_;
  Handler handler_;
  int received_ = 0;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace xllm_worker
