#include "lifecycle_ends.h"

#include <pybind11/embed.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "xllm_executor/errors.h"
#include "xllm_executor/python_runtime.h"

namespace hosts {

namespace py = pybind11;

namespace {

using xllm_executor::PyCausalLM;
using xllm_executor::PyExecutor;
using xllm_executor::PythonRuntime;

// The name of the most derived class, and the message.
std::string describe_error(const std::function<void()>& call) {
  try {
    call();
    return "no error";
  } catch (const xllm_executor::RefusedStep& error) {
    return std::string("RefusedStep: ") + error.what();
  } catch (const xllm_executor::OutOfMemory& error) {
    return std::string("OutOfMemory: ") + error.what();
  } catch (const xllm_executor::PythonError& error) {
    return std::string("PythonError: ") + error.what();
  } catch (const xllm_executor::InterpreterEnded& error) {
    return std::string("InterpreterEnded: ") + error.what();
  } catch (const xllm_executor::EnvironmentError& error) {
    return std::string("EnvironmentError: ") + error.what();
  } catch (const xllm_executor::UsageError& error) {
    return std::string("UsageError: ") + error.what();
  }
}

void print_error(const std::function<void()>& call) { std::printf("%s\n", describe_error(call).c_str()); }

int end_process(const std::string& way) {
  if (way == "exit") {
    std::exit(7);
  }
  if (way == "thread") {
    std::thread([] {
      if (PythonRuntime::alive()) {
        std::exit(7);
      }
    }).join();
  }
  return 7;
}

std::atomic<bool> g_in_call{false};
std::atomic<bool> g_destroyed{false};

// A state dict that makes a static object when it is read, and uses it until the end of the call.
class LateStatic final : public xllm_executor::StateDict {
 public:
  [[nodiscard]] bool has(const std::string& /*name*/) const override { return false; }
  [[nodiscard]] at::Tensor get_tensor(const std::string& /*name*/) const override { return {}; }
  [[nodiscard]] std::vector<std::string> keys() const override {
    std::atexit([] { g_destroyed.store(true); });
    g_in_call.store(true);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    if (g_destroyed.load()) {
      _exit(99);
    }
    return {};
  }
};

}  // namespace

int exit_in_first_load(const std::string& model_path, const std::string& how) {
  std::thread([model_path] {
    try {
      SmallHost host(model_path);
      for (int length = 1;; length = length % 8 + 1) {
        (void)host.step(length);
      }
    } catch (const xllm_executor::InterpreterEnded&) {
    }
  }).detach();
  const std::string way = how.substr(0, how.find(':'));
  std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(how.substr(way.size() + 1))));
  return end_process(way);
}

int exit_after_a_late_static(const std::string& model_path, const std::string& way) {
  std::thread([model_path] {
    PyCausalLM model = PyCausalLM::load({.model_path = model_path});
    const LateStatic weights;
    (void)describe_error([&] { model.load_weights({&weights}); });
  }).detach();
  while (!g_in_call.load()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return end_process(way);
}

int return_while_a_loop_runs(SmallHost& host) {
  auto* const shared = new SmallHost(std::move(host));  // never freed: the thread uses it until the process ends
  std::atomic<int> steps{0};
  static std::atomic<int>* const counter = &steps;
  std::thread([shared] {
    for (;;) {
      (void)shared->step();
      counter->fetch_add(1);
    }
  }).detach();
  while (steps.load() < 10) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 5;
}

int fork_beside_a_step(SmallHost& host) {
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    while (!stop.load()) {
      (void)host.step();
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto start = std::chrono::steady_clock::now();
  const pid_t child = fork();
  if (child == 0) {
    print_error([&] { (void)host.step(); });
    std::exit(PythonRuntime::alive() ? 1 : 3);
  }
  int status = 0;
  waitpid(child, &status, 0);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  stop.store(true);
  thread.join();
  std::printf("{\"code\": %d, \"seconds\": %.3f}\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
              took.count());
  return host.steps(3);
}

int call_from_a_sub_interpreter(SmallHost& host) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyThreadState* const own = PyThreadState_Get();
  PyThreadState* const sub = Py_NewInterpreter();
  print_error([&] { (void)host.step(); });
  print_error([] { (void)PyCausalLM::load({.model_path = "none"}); });
  print_error([] { PythonRuntime::shutdown(); });
  Py_EndInterpreter(sub);
  PyThreadState_Swap(own);
  PyGILState_Release(gil);
  return host.steps(3);
}

int moved_from(const std::string& model_path) {
  PyCausalLM model = PyCausalLM::load({.model_path = model_path});
  const PyCausalLM taken = std::move(model);
  PyExecutor executor(taken, {}, 4);
  PyExecutor other = std::move(executor);
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  const std::vector<std::function<void()>> calls = {
      [&] { (void)model.args(); },
      [&] { (void)model.dtype(); },
      [&] { (void)model.device(); },
      [&] { (void)model.cache_specs(); },
      [&] { (void)model.logits(int32({1}), std::nullopt); },
      [&] { model.load_weights({}); },
      [&] { PyExecutor(model, {}, 4); },
      [&] { executor.bind_kv_caches({}); },
      [&] { executor.warmup(); },
      [&] { (void)executor.execute({}); },
      [&] { (void)executor.stats_json(); },
      [&] { (void)executor.metrics(); },
      [&] { executor.shutdown(); },
  };
  // NOLINTEND(bugprone-use-after-move)
  for (const auto& call : calls) {
    print_error(call);
  }
  return 0;
}

int error_types(const std::string& model_path) {
  SmallHost host(model_path);
  print_error([&] { (void)host.step(1 << 20); });
  print_error([&] { (void)host.executor().execute({}); });
  const std::vector<std::string> exceptions = {
      "TypeError('a')",
      "torch.OutOfMemoryError('b')",
      "MemoryError('c')",
      "RuntimeError(\"[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried\")",
      "RuntimeError('d')",
      "KeyError('e')",
  };
  for (const std::string& exception : exceptions) {
    {
      const py::gil_scoped_acquire gil;
      py::exec("import torch, xllm_executor\n"
               "def fail(*arguments): raise " + exception + "\n"
               "xllm_executor.ModelExecutor.execute = fail");
    }
    SmallHost broken(model_path);
    print_error([&] { (void)broken.step(); });
  }
  print_error([&] { SmallHost absent(model_path + "/nowhere"); });
  PythonRuntime::shutdown();
  print_error([&] { (void)host.step(); });
  return 0;
}

int locale_across_start(const std::string& executable) {
  PythonRuntime::start({.executable = executable});
  std::printf("%s\n", std::setlocale(LC_CTYPE, nullptr));
  return 0;
}

}  // namespace hosts
