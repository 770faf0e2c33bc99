// A host whose life is the test: start, steps, threads, errors, and every way of ending. One scenario a run.
//
//   life_host MODEL_DIR EXECUTABLE SCENARIO [ARGUMENT]
//
// The same code is an ordinary program (life_main.cpp) and a plugin that another program opens (life_loader.cpp).
#include <ATen/ATen.h>
#include <pybind11/embed.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "xllm/executor/executor.h"
#include "xllm/executor/python_runtime.h"
#include "xllm/metadata/host_mirrors.h"

namespace py = pybind11;

namespace {

using xllm::AttentionMetadata;
using xllm::executor::PyCausalLM;
using xllm::executor::PyExecutor;
using xllm::executor::PythonError;
using xllm::executor::PythonRuntime;
using Clock = std::chrono::steady_clock;

constexpr int64_t kPageSize = 4;
constexpr int64_t kNumBlocks = 16;

at::Tensor int32(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

std::vector<std::vector<at::Tensor>> make_caches(const PyCausalLM& model) {
  std::vector<std::vector<at::Tensor>> caches;
  for (const auto& shape : model.cache_shapes()) {
    const std::vector<int64_t> sizes = {kNumBlocks, kPageSize, shape.num_kv_heads, shape.head_dim};
    const auto options = at::TensorOptions().dtype(model.dtype()).device(model.device());
    caches.push_back({at::full(sizes, 0, options), at::full(sizes, 0, options)});
  }
  return caches;
}

// A decode step of one sequence of `length` tokens in pages 1, 2, ...; the mirrors are completed as a framework does
// that has only the KV lengths.
AttentionMetadata decode_metadata(int32_t length) {
  const auto num_pages = static_cast<int32_t>((length + kPageSize - 1) / kPageSize);
  std::vector<int32_t> pages;
  for (int32_t page = 1; page <= num_pages; ++page) {
    pages.push_back(page);
  }
  AttentionMetadata metadata;
  metadata.slot_mapping(int32({static_cast<int32_t>(num_pages * kPageSize + (length - 1) % kPageSize)}))
      .paged_kv_indptr(int32({0, num_pages}))
      .paged_kv_indices(int32(pages))
      .paged_kv_last_page_len(int32({static_cast<int32_t>((length - 1) % kPageSize + 1)}))
      .kv_cu_seq_lens(int32({0, length}))
      .kv_seq_lens_host(int32({0, length}));
  xllm::complete_host_mirrors(metadata, kPageSize);
  return metadata;
}

class Host {
 public:
  explicit Host(const std::string& model_path, const xllm::executor::Config& config = {})
      : model_(PyCausalLM::load({.model_path = model_path, .dtype = "float32"})), executor_(model_, config, 4) {
    executor_.bind_kv_caches(make_caches(model_));
  }

  at::Tensor step(int32_t length = 3, int32_t token = 8) {
    const AttentionMetadata metadata = decode_metadata(length);
    return executor_.execute(int32({token}), int32({length - 1}), metadata, int32({0}));
  }

  PyExecutor& executor() { return executor_; }

 private:
  PyCausalLM model_;
  PyExecutor executor_;
};

int64_t live_objects() {
  const py::gil_scoped_acquire gil;
  const py::module_ gc = py::module_::import("gc");
  gc.attr("collect")();
  return static_cast<int64_t>(py::len(gc.attr("get_objects")()));
}

int steps(Host& host, int count) {
  for (int i = 0; i < count; ++i) {
    (void)host.step(1 + i % 8);
  }
  return 0;
}

// One thread runs steps for ever; another leaves the process meanwhile.
int exit_in_mid_step(Host& host, bool from_main) {
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

int print_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const PythonError& error) {
    std::printf("%s\n", error.what());
    return 0;
  }
  return 1;
}

// Steps on one thread while others take a lock of the host and work, the way a scheduler and a device queue do: the lock
// is held around a step by one, and around nothing that calls Python by the others.
int threads(Host& host, double seconds) {
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

// How much C++ work a thread gets done beside steps in Python, against the same beside a step that burns as much CPU
// time without Python.
int gil_loss(Host& host, double seconds) {
  const auto count_beside = [&](const std::function<void()>& step) {
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
  steps(host, 200);
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
    const double beside_python = count_beside([&] { (void)host.step(); });
    best = std::max(best, beside_python / count_beside(burn));
  }
  std::printf("{\"ratio\": %.3f, \"step_us\": %.1f}\n", best,
              std::chrono::duration<double, std::micro>(one_step).count());
  return 0;
}

int flat(Host& host, int count) {
  steps(host, count / 10);
  const int64_t objects_before = live_objects();
  const double resident_before = host.executor().metrics().at("memory.resident_bytes");
  steps(host, count - count / 10);
  std::printf("{\"objects_before\": %lld, \"objects_after\": %lld, \"resident_before\": %.0f, \"resident_after\": %.0f}\n",
              static_cast<long long>(objects_before), static_cast<long long>(live_objects()), resident_before,
              host.executor().metrics().at("memory.resident_bytes"));
  return 0;
}

// A state dict in C++ memory.
class HostWeights final : public xllm::executor::StateDict {
 public:
  explicit HostWeights(std::map<std::string, at::Tensor> tensors) : tensors_(std::move(tensors)) {}
  [[nodiscard]] bool has(const std::string& name) const override { return tensors_.contains(name); }
  [[nodiscard]] at::Tensor get_tensor(const std::string& name) const override { return tensors_.at(name); }
  [[nodiscard]] std::vector<std::string> keys() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) {
      names.push_back(name);
    }
    return names;
  }

 private:
  std::map<std::string, at::Tensor> tensors_;
};

std::vector<HostWeights> read_weights(const std::string& model_path) {
  const py::gil_scoped_acquire gil;
  const auto tensors = py::module_::import("safetensors.torch")
                           .attr("load_file")(model_path + "/model.safetensors")
                           .cast<std::map<std::string, at::Tensor>>();
  std::map<std::string, at::Tensor> halves[2];
  for (const auto& [name, tensor] : tensors) {
    halves[name.size() % 2].emplace(name, tensor);
  }
  return {HostWeights(halves[0]), HostWeights(halves[1])};
}

// The calling order of xLLM's bridge: model from args, weights from the host's state dicts, hidden states from execute,
// logits by a second call. Prints the largest difference to the ordinary order.
int compatible_order(const std::string& model_path) {
  Host ordinary(model_path);
  const xllm::ModelArgs args = PyCausalLM::load({.model_path = model_path, .dtype = "float32"}).args();
  xllm::ParallelArgs parallel;
  PyCausalLM model = PyCausalLM::create(args, parallel, "cpu");
  const std::vector<HostWeights> weights = read_weights(model_path);
  model.load_weights({&weights[0], &weights[1]});
  PyExecutor executor(model, {{"logits_in_graph", false}}, 4);
  executor.bind_kv_caches(make_caches(model));
  double worst = 0;
  for (int32_t length = 1; length <= 6; ++length) {
    const AttentionMetadata metadata = decode_metadata(length);
    const at::Tensor hidden = executor.execute(int32({length}), int32({length - 1}), metadata, std::nullopt);
    const at::Tensor logits = model.logits(hidden, int32({0}));
    worst = std::max(worst, (logits - ordinary.step(length, length)).abs().max().item<double>());
  }
  std::printf("{\"difference\": %g}\n", worst);
  return print_error([&] { model.load_weights({&weights[0]}); });
}

int metrics(Host& host) {
  steps(host, 7);
  std::string line;
  for (const auto& [name, value] : host.executor().metrics()) {
    line += (line.empty() ? "{\"" : ", \"") + name + "\": " + std::to_string(value);
  }
  std::printf("%s}\n", line.c_str());
  return 0;
}

int say_things() {
  const py::gil_scoped_acquire gil;
  py::exec(R"(
import logging, sys, warnings
logging.getLogger("some.module").error("an error of %s", "logging")
warnings.warn("a warning", stacklevel=1)
print("a printed line")
print("to stderr", file=sys.stderr)
)");
  return 0;
}

// What each signal does. Python must leave that as the host has it.
std::vector<void (*)(int)> signal_handlers() {
  std::vector<void (*)(int)> handlers;
  for (const int number : {SIGINT, SIGTERM, SIGPIPE, SIGCHLD}) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    handlers.push_back(action.sa_handler);
  }
  return handlers;
}

int after_shutdown(const std::string& model_path) {
  auto host = std::make_unique<Host>(model_path);
  (void)host->step();
  PythonRuntime::shutdown();
  PythonRuntime::shutdown();
  for (const auto& call : std::vector<std::function<void()>>{[&] { (void)host->step(); },
                                                             [&] { (void)host->executor().stats_json(); },
                                                             [&] { Host another(model_path); },
                                                             [&] { PythonRuntime::get(); },
                                                             [&] { PythonRuntime::start(); }}) {
    try {
      call();
      return 1;
    } catch (const std::runtime_error& error) {
      std::printf("%s\n", error.what());
    }
  }
  host.reset();
  return 0;
}

int where() {
  const py::gil_scoped_acquire gil;
  py::exec(R"(
import json, sys, torch, xllm_executor
print(json.dumps({"prefix": sys.prefix, "torch": torch.__file__, "xllm_executor": xllm_executor.__file__}), file=sys.stderr)
)");
  return 0;
}

void print_record(int level, std::string_view logger, std::string_view message) {
  std::printf("%d|%.*s|%.*s\n", level, static_cast<int>(logger.size()), logger.data(),
              static_cast<int>(message.size()), message.data());
}

int run(const std::string& model_path, const std::string& executable, const std::string& scenario,
        const std::string& argument) {
  if (scenario == "join" || scenario == "join_other") {
    // The host runs Python itself, and holds the GIL.
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    PyConfig_SetBytesString(&config, &config.executable, executable.c_str());
    Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    PythonRuntime::start({.executable = scenario == "join" ? executable : "/usr/bin/env"});
    Host host(model_path);
    steps(host, 3);
    py::exec("total = sum(range(10)); assert total == 45");
    PyEval_SaveThread();
    return std::thread([&] { steps(host, 3); }).join(), 0;
  }
  const auto handlers = signal_handlers();
  xllm::executor::PythonOptions options{.executable = executable};
  if (scenario == "sink") {
    options.log_sink = print_record;
  }
  PythonRuntime::start(options);
  if (scenario == "sink" || scenario == "no_sink") {
    return say_things();
  }
  if (scenario == "where") {
    return where();
  }
  if (scenario == "signals") {
    Host host(model_path);
    steps(host, 3);
    return signal_handlers() == handlers ? 0 : 1;
  }
  if (scenario == "compatible") {
    return compatible_order(model_path);
  }
  if (scenario == "shutdown_first") {
    return after_shutdown(model_path);
  }
  if (scenario == "constructor_error") {
    return print_error([&] { Host host(model_path + "/nowhere"); }) + print_error([&] { Host host(model_path, {{"no", 1L}}); });
  }
  Host host(model_path);
  if (scenario == "steps") {
    return steps(host, std::stoi(argument));
  }
  if (scenario == "steps_and_shutdown") {
    steps(host, std::stoi(argument));
    PythonRuntime::shutdown();
    return 0;
  }
  if (scenario == "steps_on_another_thread") {
    std::thread([&] { steps(host, std::stoi(argument)); }).join();
    return 0;
  }
  if (scenario == "exit_from_main" || scenario == "exit_from_thread") {
    return exit_in_mid_step(host, scenario == "exit_from_main");
  }
  if (scenario == "execute_error") {
    const int failed = print_error([&] { (void)host.step(1 << 20); });
    return failed + steps(host, 10);
  }
  if (scenario == "threads") {
    return threads(host, std::stod(argument));
  }
  if (scenario == "gil_loss") {
    return gil_loss(host, std::stod(argument));
  }
  if (scenario == "flat") {
    return flat(host, std::stoi(argument));
  }
  if (scenario == "metrics") {
    return metrics(host);
  }
  std::fprintf(stderr, "no scenario %s\n", scenario.c_str());
  return 2;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int host_main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: MODEL_DIR EXECUTABLE SCENARIO [ARGUMENT]\n");
    return 2;
  }
  try {
    return run(argv[1], argv[2], argv[3], argc > 4 ? argv[4] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
