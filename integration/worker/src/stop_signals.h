// Handles SIGINT and SIGTERM on a separate thread, so that the worker can report its unfinished requests.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace xllm_worker {

// "SIGINT" or "SIGTERM".
std::string signal_name(int number);

// Blocks both signals on the calling thread and on all threads started later, and waits for them on its own thread.
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

  mutable std::mutex mutex_;
  Handler handler_;
  int received_ = 0;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace xllm_worker
