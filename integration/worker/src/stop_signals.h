// SIGINT and SIGTERM as calls on a thread of their own, so that the worker can say what becomes of its requests.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace xllm::worker {

// "SIGINT" or "SIGTERM".
std::string signal_name(int number);

// Blocks both signals on the thread that makes it, and so on every thread made after it, and waits for them on its own.
// Without a handler a signal ends the process at once with exit code 128 + number and a line on stderr.
class StopSignals {
 public:
  using Handler = std::function<void(int number)>;

  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // From now on a signal calls the handler, on the waiting thread; none restores the ending at once. Returns when no call
  // of the handler before is running.
  void set_handler(Handler handler);

  // The signal that came first; 0 before one.
  [[nodiscard]] int received() const;

 private:
  void wait();

  mutable std::mutex mutex_;
  Handler handler_;
  int received_ = 0;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace xllm::worker
