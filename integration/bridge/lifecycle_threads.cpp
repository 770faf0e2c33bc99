#include "lifecycle_threads.h"

#include <pybind11/embed.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "xllm_executor/python_runtime.h"

namespace hosts {

using xllm_executor::PythonRuntime;
using Clock = std::chrono::steady_clock;

int exit_during_a_step(SmallHost& host, bool from_main) {
  std::atomic<int> done{0};
  const auto run_for_ever = [&] {
    for (;;) {
      try {
        (void)host.step();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        std::this_thread::sleep_for(std::chrono::hours(1));
      }
      ++done;
    }
  };
  const auto leave = [&] {
    while (done.load() < 20) {
      std::this_thread::yield();
    }
    std::exit(0);
  };
  std::thread other(from_main ? std::function<void()>(run_for_ever) : std::function<void()>(leave));
  from_main ? leave() : run_for_ever();
  return 1;
}

int threads(SmallHost& host, double seconds) {
  std::atomic<bool> stop{false};
  std::atomic<int64_t> num_steps{0};
  std::atomic<int64_t> work{0};
  std::mutex device_lock;
  std::vector<std::thread> pool;
  pool.emplace_back([&] {
    while (!stop.load()) {
      const std::lock_guard lock(device_lock);
      (void)host.step(1 + static_cast<int32_t>(num_steps++ % 8));
    }
  });
  pool.emplace_back([&] {
    while (!stop.load()) {
      (void)host.executor().stats_json();  // the GIL, without the lock
      (void)host.executor().metrics();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (int i = 0; i < 2; ++i) {
    pool.emplace_back([&] {
      while (!stop.load()) {
        const std::lock_guard lock(device_lock);  // the lock, without the GIL
        ++work;
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop.store(true);
  for (std::thread& thread : pool) {
    thread.join();
  }
  std::printf("{\"steps\": %lld, \"work\": %lld}\n", static_cast<long long>(num_steps), static_cast<long long>(work));
  return num_steps > 0 && work > 0 ? 0 : 1;
}

int gil_loss(SmallHost& host, double seconds) {
  const auto count_during = [&](const std::function<void()>& step) {
    std::atomic<bool> stop{false};
    int64_t count = 0;
    std::thread stepper([&] {
      while (!stop.load()) {
        step();
      }
    });
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    volatile double sink = 1.0;
    while (Clock::now() < end) {
      for (int i = 0; i < 1000; ++i) {
        sink = sink * 1.0000001 + 1e-9;
      }
      ++count;
    }
    stop.store(true);
    stepper.join();
    return static_cast<double>(count);
  };
  const auto start = Clock::now();
  host.steps(200);
  const auto one_step = (Clock::now() - start) / 200;
  const auto burn = [&] {
    const auto until = Clock::now() + one_step;
    volatile double sink = 1.0;
    while (Clock::now() < until) {
      sink = sink * 1.0000001;
    }
  };
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const double during_python = count_during([&] { (void)host.step(); });
    best = std::max(best, during_python / count_during(burn));
  }
  std::printf("{\"ratio\": %.3f, \"step_us\": %.1f}\n", best,
              std::chrono::duration<double, std::micro>(one_step).count());
  return 0;
}

int shutdown_during_steps(const std::string& model_path) {
  constexpr int kNumThreads = 3;
  std::mutex lock;
  std::unique_ptr<SmallHost> previous;  // created by one thread, destroyed by the next
  std::vector<std::string> refusals;
  std::atomic<int> rounds{0};
  std::vector<std::thread> pool;
  for (int i = 0; i < kNumThreads; ++i) {
    pool.emplace_back([&] {
      try {
        for (;;) {
          auto host = std::make_unique<SmallHost>(model_path);
          host->steps(5);
          (void)host->executor().metrics();
          {
            const std::lock_guard guard(lock);
            host.swap(previous);
          }
          ++rounds;
        }
      } catch (const std::exception& error) {
        const std::lock_guard guard(lock);
        refusals.emplace_back(error.what());
      }
    });
  }
  while (rounds.load() < 3 * kNumThreads) {
    std::this_thread::yield();
  }
  PythonRuntime::shutdown();
  for (std::thread& thread : pool) {
    thread.join();
  }
  previous.reset();
  for (const std::string& refusal : refusals) {
    std::printf("%s\n", refusal.c_str());
  }
  return 0;
}

int shutdown_with_the_gil(SmallHost& host) {
  std::atomic<int> done{0};
  std::thread other([&] {
    try {
      for (;; ++done) {
        (void)host.step();
      }
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
    }
  });
  {
    const pybind11::gil_scoped_release released;
    while (done.load() < 20) {
      std::this_thread::yield();
    }
  }
  PythonRuntime::shutdown();
  const pybind11::gil_scoped_release released;
  other.join();
  return 0;
}

int call_on_two_threads(const std::function<void()>& call) {
  const auto make = [&] {
    try {
      call();
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
    }
  };
  std::thread other(make);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  make();
  const pybind11::gil_scoped_release released;
  other.join();
  return 0;
}

int steps_on_python_threads(SmallHost& host) {
  const pybind11::gil_scoped_acquire gil;
  pybind11::dict globals;
  globals["__builtins__"] = pybind11::module_::import("builtins");
  globals["steps"] = pybind11::cpp_function([&host] {
    const pybind11::gil_scoped_release released;
    host.steps(20);
  });
  pybind11::exec(R"(
import threading

for _ in range(5):
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
)",
                 globals);
  return 0;
}

int leave_a_thread_in_steps(const std::string& model_path) {
  static std::atomic<int> done{0};
  auto* host = new SmallHost(model_path);  // owned by the detached thread  NOLINT(cppcoreguidelines-owning-memory)
  std::thread([host] {
    try {
      for (;; ++done) {
        (void)host->step();
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }).detach();
  while (done.load() < 20) {
    std::this_thread::yield();
  }
  return 0;
}

int exit_during_a_destructor(const std::string& model_path) {
  auto host = std::make_unique<SmallHost>(model_path);
  {
    const pybind11::gil_scoped_acquire gil;
    pybind11::exec(R"(
import sys, time, xllm_executor

def report(self):
    time.sleep(1)
    print("destroyed", file=sys.stderr)

xllm_executor.ModelExecutor.__del__ = report
)");
  }
  std::atomic<bool> begun{false};
  std::thread([&] {
    begun.store(true);
    host.reset();
    std::this_thread::sleep_for(std::chrono::hours(1));
  }).detach();
  while (!begun.load()) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::exit(0);
}

int race() {
  int unguarded = 0;
  std::thread other([&] { ++unguarded; });
  ++unguarded;
  other.join();
  return unguarded == 2 ? 0 : 1;
}

int leak() {
  int* volatile block = nullptr;
  for (int i = 0; i < 10; ++i) {
    block = new int[1000]();  // NOLINT(cppcoreguidelines-owning-memory)
  }
  return block != nullptr ? 0 : 1;
}

}  // namespace hosts
