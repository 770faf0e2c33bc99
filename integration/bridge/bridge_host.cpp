// A small host that drives the bridge through its public headers and prints what it saw, one JSON object a line.
//
//   bridge_host MODEL_DIR EXECUTABLE MODULE_PATH SCENARIO
#include <xllm_executor/executor.h>
#include <xllm_executor/python_runtime.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "host_inputs.h"

namespace {

using hosts::int32;
using xllm_executor::StepInput;
using xllm_executor::PyCausalLM;
using xllm_executor::PyExecutor;
using xllm_executor::PythonError;
using xllm_executor::PythonRuntime;

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
    }
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out + "\"";
}

void print_line(const std::map<std::string, std::string>& fields) {
  std::string line;
  for (const auto& [key, value] : fields) {
    line += (line.empty() ? "{" : ", ") + quoted(key) + ": " + value;
  }
  std::printf("%s}\n", line.c_str());
  std::fflush(stdout);
}

std::string address(const at::Tensor& tensor) { return std::to_string(reinterpret_cast<uintptr_t>(tensor.data_ptr())); }

// A prompt of three tokens in page 1.
StepInput prefill_step() {
  StepInput step{int32({5, 6, 7}), int32({0, 1, 2}), {}, int32({2})};
  step.metadata.slot_mapping(int32({4, 5, 6}))
      .paged_kv_indptr(int32({0, 1}))
      .paged_kv_indices(int32({1}))
      .paged_kv_last_page_len(int32({3}))
      .kv_cu_seq_lens(int32({0, 3}))
      .qo_indptr(int32({0, 3}))
      .kv_seq_lens_host(int32({0, 3}))
      .paged_kv_indptr_host(int32({0, 1}))
      .paged_kv_last_page_len_host(int32({3}))
      .qo_indptr_host(int32({0, 3}))
      .max_query_len(3)
      .max_seq_len(3)
      .is_prefill(true);
  return step;
}

// Its next token.
StepInput decode_step() {
  StepInput step{int32({8}), int32({3}), {}, int32({0})};
  step.metadata.slot_mapping(int32({7}))
      .paged_kv_indptr(int32({0, 1}))
      .paged_kv_indices(int32({1}))
      .paged_kv_last_page_len(int32({4}))
      .kv_cu_seq_lens(int32({0, 4}))
      .kv_seq_lens_host(int32({0, 4}))
      .paged_kv_indptr_host(int32({0, 1}))
      .paged_kv_last_page_len_host(int32({4}))
      .max_query_len(1)
      .max_seq_len(4);
  return step;
}

void print_step(const StepInput& step, const at::Tensor& logits) {
  std::map<std::string, std::string> fields = {{"tokens", address(step.tokens)},
                                               {"positions", address(step.positions)},
                                               {"logits_indices", address(*step.logits_indices)},
                                               {"logits_rows", std::to_string(logits.size(0))},
                                               {"logits_cols", std::to_string(logits.size(1))}};
  xllm_metadata::for_each_property(step.metadata, [&]<class T>(std::string_view name, const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      fields[std::string(name)] = address(value);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      fields[std::string(name)] = value.has_value() ? address(*value) : "null";
    } else {
      fields[std::string(name)] = std::is_same_v<T, bool> ? (value ? "true" : "false") : std::to_string(value);
    }
  });
  print_line(fields);
}

at::Tensor run(PyExecutor& executor, const StepInput& step) { return executor.execute(step).logits; }

void print_python_error(const std::function<void()>& call) {
  try {
    call();
    print_line({{"error", "null"}});
  } catch (const PythonError& error) {
    print_line({{"error", quoted(error.what())},
                {"type", quoted(error.type())},
                {"message", quoted(error.message())},
                {"traceback", quoted(error.traceback())}});
  } catch (const std::exception& error) {
    print_line({{"error", quoted(error.what())}, {"type", "null"}});
  }
}

void print_caches(const std::vector<std::vector<at::Tensor>>& caches) {
  std::string list;
  for (const auto& layer : caches) {
    list += (list.empty() ? "[[" : ", [") + address(layer[0]) + ", " + address(layer[1]) + "]";
  }
  print_line({{"caches", list + "]"}});
}

int drive(const std::string& model_path) {
  const PyCausalLM model = PyCausalLM::load({.model_path = model_path, .dtype = "float32"});
  print_line({{"model_type", quoted(model.args().model_type())},
              {"n_layers", std::to_string(model.args().n_layers())},
              {"vocab_size", std::to_string(model.args().vocab_size())}});
  PyExecutor executor(model, {.attention_backend = "recorder"}, 4);
  const auto caches = hosts::make_caches(model);
  print_caches(caches);
  executor.bind_kv_caches(caches);
  for (const StepInput& step : {prefill_step(), decode_step(), decode_step()}) {
    print_step(step, run(executor, step));
  }
  print_line({{"stats", executor.stats_json()}});

  // A step that Python refuses, and one that works after it.
  StepInput wrong = decode_step();
  wrong.metadata.max_seq_len(1 << 20);
  print_python_error([&] { (void)run(executor, wrong); });
  print_python_error([&] { (void)run(executor, decode_step()); });

  // Another thread, which Python has never seen.
  std::thread([&] { print_python_error([&] { (void)run(executor, decode_step()); }); }).join();

  print_python_error([&] { executor.bind_kv_caches(caches); });
  print_python_error([&] { PyExecutor(model, {.attention_backend = "no_such_backend"}, 4); });
  print_python_error([&] { (void)PyCausalLM::load({.model_path = model_path + "/nowhere"}); });
  print_python_error([] { PythonRuntime::start(); });
  executor.shutdown();
  executor.shutdown();
  print_python_error([&] { (void)run(executor, decode_step()); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s MODEL_DIR EXECUTABLE MODULE_PATH drive|start|early\n", argv[0]);
    return 2;
  }
  const std::string scenario = argv[4];
  try {
    if (scenario == "early") {
      print_python_error([&] { (void)PyCausalLM::load({.model_path = argv[1]}); });
      return 0;
    }
    const PythonRuntime& runtime = PythonRuntime::start({.executable = argv[2], .module_paths = {argv[3]}});
    print_line({{"executable", quoted(runtime.executable())}, {"version", quoted(runtime.version())}});
    return scenario == "start" ? 0 : drive(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
