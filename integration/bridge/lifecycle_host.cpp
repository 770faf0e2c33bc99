// A test host for the interpreter's lifecycle: start, steps, threads, errors, and every way to end. Each run is one
// scenario.
//
//   lifecycle_host MODEL_DIR EXECUTABLE SCENARIO [ARGUMENT]
//
// The same code is built as a program (lifecycle_main.cpp) and as a plugin that another program opens
// (lifecycle_loader.cpp). Scenarios with several threads are in lifecycle_threads.cpp.
#include <ATen/ATen.h>
#include <pybind11/embed.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lifecycle_ends.h"
#include "lifecycle_threads.h"
#include "small_host.h"
#include "xllm_executor/executor.h"
#include "xllm_executor/python_runtime.h"

namespace py = pybind11;

namespace {

using hosts::int32;
using hosts::SmallHost;
using xllm_metadata::AttentionMetadata;
using xllm_executor::PyCausalLM;
using xllm_executor::PyExecutor;
using xllm_executor::PythonError;
using xllm_executor::PythonRuntime;

int64_t live_objects() {
  const py::gil_scoped_acquire gil;
  const py::module_ gc = py::module_::import("gc");
  gc.attr("collect")();
  return static_cast<int64_t>(py::len(gc.attr("get_objects")()));
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

double metric(SmallHost& host, const std::string& name) {
  for (const xllm_executor::Metric& sample : host.executor().metrics()) {
    if (sample.name == name) {
      return sample.value;
    }
  }
  throw std::out_of_range("no metric " + name);
}

double resident_bytes(SmallHost& host) { return metric(host, "xllm_executor_resident_memory_bytes"); }

int flat(SmallHost& host, int count) {
  host.steps(count / 10);
  const int64_t objects_before = live_objects();
  const double resident_before = resident_bytes(host);
  host.steps(count - count / 10);
  std::printf("{\"objects_before\": %lld, \"objects_after\": %lld, "
              "\"resident_before\": %.0f, \"resident_after\": %.0f}\n",
              static_cast<long long>(objects_before), static_cast<long long>(live_objects()), resident_before,
              resident_bytes(host));
  return 0;
}

// A state dict in C++ memory.
class HostWeights final : public xllm_executor::StateDict {
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
  SmallHost ordinary(model_path);
  const xllm_metadata::ModelArgs args = PyCausalLM::load({.model_path = model_path, .dtype = "float32"}).args();
  xllm_metadata::ParallelArgs parallel;
  PyCausalLM model = PyCausalLM::create(args, parallel, "cpu");
  const std::vector<HostWeights> weights = read_weights(model_path);
  model.load_weights({&weights[0], &weights[1]});
  PyExecutor executor(model, {.logits_in_graph = false}, 4);
  executor.bind_kv_caches(hosts::make_caches(model));
  double worst = 0;
  for (int32_t length = 1; length <= 6; ++length) {
    const xllm_metadata::AttentionMetadata metadata = hosts::decode_metadata(length);
    const at::Tensor hidden = executor.execute({int32({length}), int32({length - 1}), metadata, {}}).hidden_states;
    const at::Tensor logits = model.logits(hidden, int32({0}));
    worst = std::max(worst, (logits - ordinary.step(length, length)).abs().max().item<double>());
  }
  std::printf("{\"difference\": %g}\n", worst);
  return print_error([&] { model.load_weights({&weights[0]}); });
}

int metrics(SmallHost& host) {
  host.steps(7);
  auto samples = host.executor().metrics();
  samples.push_back({.name = "host_strange",
                     .kind = xllm_executor::MetricKind::kGauge,
                     .help = "A \\ and\na line.",
                     .labels = {{"label", "a \"b\" \\ c\nd"}},
                     .value = 0.1});
  std::printf("%s", xllm_executor::prometheus_text(samples, {{"model", "small"}, {"runner", "host"}}).c_str());
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
  auto host = std::make_unique<SmallHost>(model_path);
  (void)host->step();
  PythonRuntime::shutdown();
  PythonRuntime::shutdown();
  for (const auto& call : std::vector<std::function<void()>>{[&] { (void)host->step(); },
                                                             [&] { (void)host->executor().stats_json(); },
                                                             [&] { SmallHost another(model_path); },
                                                             [&] { PythonRuntime::get(); },
                                                             [&] { PythonRuntime::start(); }}) {
    try {
      call();
      return 1;
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
    }
  }
  host.reset();
  return 0;
}

struct ShutdownAtExit {
  ~ShutdownAtExit() { PythonRuntime::shutdown(); }
};

int shutdown_in_a_static_destructor(SmallHost& host) {
  static const ShutdownAtExit guard;
  (void)guard;
  return host.steps(20), 0;  // Python's end, which is registered in them again, comes before the destructor
}

int where() {
  const py::gil_scoped_acquire gil;
  py::exec(R"(
import json, subprocess, sys, torch, xllm_executor
where = {"prefix": sys.prefix, "torch": torch.__file__, "xllm_executor": xllm_executor.__file__,
         "flags": subprocess._args_from_interpreter_flags()}
print(json.dumps(where), file=sys.stderr)
)");
  return 0;
}

void print_record(int level, std::string_view logger, std::string_view message) {
  std::printf("%d|%.*s|%.*s\n", level, static_cast<int>(logger.size()), logger.data(),
              static_cast<int>(message.size()), message.data());
}

// As a host that runs Python itself. Its thread holds the GIL afterwards.
void initialize_python(const std::string& executable) {
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  config.install_signal_handlers = 0;
  PyConfig_SetBytesString(&config, &config.executable, executable.c_str());
  Py_InitializeFromConfig(&config);
  PyConfig_Clear(&config);
}

int join(const std::string& model_path, const std::string& executable, const std::string& wanted) {
  initialize_python(executable);
  PythonRuntime::start({.executable = wanted});
  SmallHost host(model_path);
  host.steps(3);
  py::exec("total = sum(range(10)); assert total == 45");
  PyEval_SaveThread();
  return std::thread([&] { host.steps(3); }).join(), 0;
}

int join_and_shut_down(const std::string& model_path, const std::string& executable) {
  initialize_python(executable);
  PythonRuntime::start({.executable = executable});
  SmallHost host(model_path);
  return hosts::shutdown_with_the_gil(host);
}

int join_twice(const std::string& executable) {
  initialize_python(executable);
  return hosts::call_on_two_threads([&] { PythonRuntime::start({.executable = executable}); });
}

int join_and_shut_down_twice(const std::string& model_path, const std::string& executable) {
  initialize_python(executable);
  PythonRuntime::start({.executable = executable});
  SmallHost host(model_path);
  host.steps(3);
  return hosts::call_on_two_threads([] { PythonRuntime::shutdown(); });
}

using Scenarios = std::map<std::string, std::function<int()>>;

// What needs no model, or makes its own.
Scenarios without_host(const std::string& model_path, const std::string& argument) {
  return {
      {"sink", say_things},
      {"no_sink", say_things},
      {"throwing_sink", [=] { return say_things() + SmallHost(model_path).steps(3); }},
      {"where", where},
      {"moved_from", [=] { return hosts::moved_from(model_path); }},
      {"error_types", [=] { return hosts::error_types(model_path); }},
      {"exit_after_a_late_static", [=] { return hosts::exit_after_a_late_static(model_path, argument); }},
      {"exit_in_first_load", [=] { return hosts::exit_in_first_load(model_path, argument); }},
      {"compatible", [=] { return compatible_order(model_path); }},
      {"shutdown_first", [=] { return after_shutdown(model_path); }},
      {"shutdown_during_steps", [=] { return hosts::shutdown_during_steps(model_path); }},
      {"leave_a_thread_in_steps", [=] { return hosts::leave_a_thread_in_steps(model_path); }},
      {"exit_during_a_destructor", [=] { return hosts::exit_during_a_destructor(model_path); }},
      {"constructor_error",
       [=] {
         return print_error([&] { SmallHost host(model_path + "/nowhere"); }) +
                print_error([&] { SmallHost host(model_path, {.max_model_len = -1}); });
       }},
  };
}

Scenarios with_host(SmallHost& host, const std::string& argument) {
  const auto steps = [&](int count) { return host.steps(count), 0; };
  return {
      {"steps", [=] { return steps(std::stoi(argument)); }},
      {"steps_and_shutdown", [=] { return steps(std::stoi(argument)), PythonRuntime::shutdown(), 0; }},
      {"shutdown_in_a_static_destructor", [&] { return shutdown_in_a_static_destructor(host); }},
      {"steps_on_another_thread", [=] { return std::thread(steps, std::stoi(argument)).join(), 0; }},
      {"steps_on_python_threads", [&] { return hosts::steps_on_python_threads(host); }},
      {"exit_from_main", [&] { return hosts::exit_during_a_step(host, true); }},
      {"exit_from_thread", [&] { return hosts::exit_during_a_step(host, false); }},
      {"execute_error", [&, steps] { return print_error([&] { (void)host.step(1 << 20); }) + steps(10); }},
      {"threads", [&] { return hosts::threads(host, std::stod(argument)); }},
      {"gil_loss", [&] { return hosts::gil_loss(host, std::stod(argument)); }},
      {"flat", [&] { return flat(host, std::stoi(argument)); }},
      {"metrics", [&] { return metrics(host); }},
      {"fork", [&] { return hosts::fork_beside_a_step(host); }},
      {"sub_interpreter", [&] { return hosts::call_from_a_sub_interpreter(host); }},
      {"return_while_a_loop_runs", [&] { return hosts::return_while_a_loop_runs(host); }},
  };
}

int run(const std::string& model_path, const std::string& executable, const std::string& scenario,
        const std::string& argument) {
  if (scenario == "race") {
    return hosts::race();
  }
  if (scenario == "leak") {
    return hosts::leak();
  }
  if (scenario == "join" || scenario == "join_other") {
    return join(model_path, executable, scenario == "join" ? executable : "/usr/bin/env");
  }
  if (scenario == "join_and_shut_down") {
    return join_and_shut_down(model_path, executable);
  }
  if (scenario == "join_twice") {
    return join_twice(executable);
  }
  if (scenario == "join_and_shut_down_twice") {
    return join_and_shut_down_twice(model_path, executable);
  }
  if (scenario == "locale") {
    return hosts::locale_across_start(executable);
  }
  const auto handlers = signal_handlers();
  xllm_executor::PythonOptions options{.executable = executable};
  if (scenario == "sink") {
    options.log_sink = print_record;
  } else if (scenario == "throwing_sink") {
    options.log_sink = [](int, std::string_view, std::string_view) { throw std::runtime_error("the disk is full"); };
  } else if (scenario == "return_while_a_loop_runs") {
    options.calls_at_exit = xllm_executor::CallsAtExit::kBlock;
  }
  PythonRuntime::start(options);
  const Scenarios first = without_host(model_path, argument);
  if (const auto found = first.find(scenario); found != first.end()) {
    return found->second();
  }
  SmallHost host(model_path);
  if (scenario == "signals") {
    host.steps(3);
    return signal_handlers() == handlers ? 0 : 1;
  }
  const Scenarios second = with_host(host, argument);
  if (const auto found = second.find(scenario); found != second.end()) {
    return found->second();
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
