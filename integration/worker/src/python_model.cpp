#include "python_model.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "kv_cache.h"
#include "torch_step_model.h"
#include "xllm/executor/causal_lm.h"
#include "xllm/executor/executor.h"
#include "xllm/executor/python_runtime.h"

namespace xllm::worker {

namespace {

namespace fs = std::filesystem;

using executor::PyCausalLM;
using executor::PyExecutor;

void check_checkpoint(const std::string& path) {
  if (!fs::is_directory(path)) throw std::runtime_error("--model=" + path + " is not a directory");
  if (!fs::is_regular_file(fs::path(path) / "config.json")) {
    throw std::runtime_error("--model=" + path + " has no config.json");
  }
}

std::vector<std::string> split_path(const std::string& text) {
  std::vector<std::string> folders;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(':', begin), text.size());
    if (end > begin) folders.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const std::string& folder : folders) {
    if (!fs::is_directory(folder)) {
      throw std::runtime_error("--python_model_path: " + folder + " is not a directory");
    }
  }
  return folders;
}

// After Python has imported torch, which brings its CUDA part in where there is one.
at::Device resolve_device(const WorkerOptions& options) {
  const DeviceChoice choice = parse_device(options);
  if (choice.kind == DeviceChoice::Kind::kCpu) return at::Device(at::kCPU);
  const int64_t num_devices = at::detail::getCUDAHooks().hasCUDA() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
  const bool may_use_cpu = choice.kind == DeviceChoice::Kind::kAuto && !choice.index_is_given;
  if (num_devices == 0 && may_use_cpu) return at::Device(at::kCPU);
  if (choice.index >= num_devices) {
    throw std::runtime_error("device cuda:" + std::to_string(choice.index) + " is not there: torch sees " +
                             std::to_string(num_devices) + " CUDA devices");
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(choice.index));
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "float32";
    case at::kBFloat16: return "bfloat16";
    case at::kHalf: return "float16";
    default: return at::toString(dtype);
  }
}

PyCausalLM load_weights(const WorkerOptions& options, at::Device device) {
  executor::LoadOptions load;
  load.model_path = options.model;
  load.device = device.str();
  load.dtype = options.dtype == "auto" ? "" : options.dtype;
  load.progress = isatty(STDERR_FILENO) == 1;
  return PyCausalLM::load(load);
}

ServerFacts make_facts(const WorkerOptions& options, const PyCausalLM& model) {
  int64_t bytes_per_token = 0;
  for (const executor::CacheShape& shape : model.cache_shapes()) {
    bytes_per_token += 2 * shape.num_kv_heads * shape.head_dim * static_cast<int64_t>(at::elementSize(model.dtype()));
  }
  ServerFacts facts;
  facts.model_type = model.args().model_type();
  facts.dtype = dtype_name(model.dtype());
  facts.device = model.device().str();
  facts.vocab_size = model.args().vocab_size();
  facts.max_model_len = choose_max_model_len(options, model.args().max_position_embeddings());
  facts.num_blocks = choose_num_blocks(options, bytes_per_token, facts.max_model_len);
  facts.block_size = options.block_size;
  facts.eos_token_ids = model.args().eos_token_ids();
  return facts;
}

std::vector<std::vector<at::Tensor>> make_kv_caches(const PyCausalLM& model, const ServerFacts& facts) {
  const auto like = at::TensorOptions().dtype(model.dtype()).device(model.device());
  std::vector<std::vector<at::Tensor>> caches;
  try {
    for (const executor::CacheShape& layer : model.cache_shapes()) {
      const auto make = [&] {
        return at::empty({facts.num_blocks, facts.block_size, layer.num_kv_heads, layer.head_dim}, like);
      };
      caches.push_back({make(), make()});
    }
  } catch (const c10::Error& error) {
    throw std::runtime_error("a KV cache of " + std::to_string(facts.num_blocks) + " pages of " +
                             std::to_string(facts.block_size) +
                             " tokens does not fit into memory: " + error.what_without_backtrace());
  }
  return caches;
}

executor::Config executor_config(const WorkerOptions& options, const ServerFacts& facts) {
  return {{"python_graph_backend", options.python_graph_backend},
          {"max_tokens_per_batch", options.max_tokens_per_batch},
          {"max_model_len", facts.max_model_len}};
}

class PythonTensorModel : public TensorModel {
 public:
  PythonTensorModel(PyCausalLM model, const WorkerOptions& options, const ServerFacts& facts)
      : model_(std::move(model)),
        guard_(model_.device()),
        executor_(model_, executor_config(options, facts), options.max_seqs_per_batch) {
    executor_.bind_kv_caches(make_kv_caches(model_, facts));
    executor_.warmup();
  }

  at::Tensor execute(const Batch& batch) override {
    try {
      return executor_.execute(batch.tokens, batch.positions, batch.metadata, batch.logits_indices);
    } catch (const executor::PythonError& error) {
      std::fprintf(stderr, "%s\n", error.traceback().c_str());
      throw;
    }
  }

  std::string stats_json() override { return executor_.stats_json(); }
  void shutdown() override { executor_.shutdown(); }

 private:
  PyCausalLM model_;
  c10::DeviceGuard guard_;  // kernels that Python launches go to the current device
  PyExecutor executor_;
};

// Whether the message of a Python exception tells a user what to change. Anything else is a fault, whose type and
// traceback help more.
bool speaks_to_user(const std::string& type) {
  if (type.starts_with("xllm_")) return true;  // the packages' own
  for (const char* name : {"ValueError", "RuntimeError", "FileNotFoundError", "NotADirectoryError", "PermissionError"}) {
    if (type == name) return true;
  }
  return false;
}

ServedModel load(const WorkerOptions& options) {
  check_checkpoint(options.model);
  executor::PythonRuntime::start({options.python_executable, split_path(options.python_model_path)});
  PyCausalLM model = load_weights(options, resolve_device(options));
  ServerFacts facts = make_facts(options, model);
  const at::Device device = model.device();
  auto tensor_model = std::make_unique<PythonTensorModel>(std::move(model), options, facts);
  auto step_model = std::make_unique<TorchStepModel>(std::move(tensor_model), options.block_size, device);
  return {std::move(step_model), std::move(facts)};
}

}  // namespace

ServedModel load_python_model(const WorkerOptions& options) {
  try {
    return load(options);
  } catch (const executor::PythonError& error) {
    if (speaks_to_user(error.type())) throw std::runtime_error(error.message());
    std::fprintf(stderr, "%s\n", error.traceback().c_str());
    throw;
  }
}

}  // namespace xllm::worker
