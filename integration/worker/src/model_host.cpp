#include "model_host.h"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "kv_cache.h"
#include "line_io.h"
#include "xllm_executor/native_state.h"
#include "xllm_executor/python_runtime.h"
#include "xllm_metadata/attention_metadata.h"
#include "xllm_metadata/version.h"

namespace xllm_worker {

namespace {

namespace fs = std::filesystem;

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

// Call after Python has imported torch, which loads torch's CUDA library. Without an index, each rank takes the device
// of its local rank.
at::Device resolve_device(const WorkerOptions& options, const RankConfig& config) {
  const DeviceChoice choice = parse_device(options);
  if (choice.kind == DeviceChoice::Kind::kCpu) return at::Device(at::kCPU);
  const int64_t num_devices = at::detail::getCUDAHooks().hasCUDA() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
  const bool may_use_cpu = choice.kind == DeviceChoice::Kind::kAuto && !choice.index_is_given;
  if (num_devices == 0 && may_use_cpu) return at::Device(at::kCPU);
  const int64_t index = choice.index_is_given ? choice.index : config.local_rank;
  if (index >= num_devices) {
    throw std::runtime_error("device cuda:" + std::to_string(index) + " does not exist: torch finds " +
                             std::to_string(num_devices) + " CUDA devices");
  }
  if (choice.index_is_given && config.size > 1 && options.tp_backend != "gloo") {
    throw std::runtime_error("--device names one device for all " + std::to_string(config.size) +
                             " ranks, which nccl refuses: use --device=cuda, or --tp_backend=gloo");
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));
}

// Divides the cores among the ranks of this machine, unless OMP_NUM_THREADS is set.
void share_threads(const RankConfig& config) {
  if (config.size > 1 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    at::set_num_threads(static_cast<int>(std::max<int64_t>(1, at::get_num_threads() / config.size)));
  }
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "float32";
    case at::kBFloat16: return "bfloat16";
    case at::kHalf: return "float16";
    default: return at::toString(dtype);
  }
}

std::vector<int64_t> group_num_pages(const ServerInfo& info) {
  std::vector<int64_t> result;
  for (const KvGroup& group : info.kv_groups) result.push_back(group.num_blocks);
  return result;
}

std::vector<std::vector<at::Tensor>> make_kv_caches(const LoadedModel& model, const ServerInfo& info) {
  const xllm_executor::CacheSizes sizes{.num_pages = info.num_blocks,
                                        .page_size = info.block_size,
                                        .num_slots = info.num_state_slots,
                                        .group_num_pages = group_num_pages(info)};
  std::vector<std::vector<at::Tensor>> caches;
  try {
    for (const auto& layer : model.cache_specs()) {
      std::vector<at::Tensor>& tensors = caches.emplace_back();
      for (const xllm_executor::CacheSpec& spec : layer) {
        const auto options = at::TensorOptions().dtype(spec.dtype).device(model.device());
        tensors.push_back(at::empty(spec.tensor_shape(sizes), options));
      }
    }
  } catch (const c10::Error& error) {
    throw std::runtime_error("a KV cache of " + std::to_string(info.num_blocks) + " pages of " +
                             std::to_string(info.block_size) +
                             " tokens does not fit into memory: " + error.what_without_backtrace());
  }
  return caches;
}

// Whether a Python exception of this type explains a user error. Other types are bugs, reported with their traceback.
bool is_user_error(const std::string& type) {
  if (type.starts_with("xllm_")) return true;  // exceptions of our own packages
  for (const char* name : {"ValueError", "RuntimeError", "FileNotFoundError", "NotADirectoryError", "PermissionError"}) {
    if (type == name) return true;
  }
  return false;
}

template <class T>
nlohmann::json to_json(const T& value) {
  return value;
}
template <class T>
nlohmann::json to_json(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

}  // namespace

void check_checkpoint(const std::string& path) {
  if (!fs::is_directory(path)) throw std::runtime_error("--model=" + path + " is not a directory");
  if (!fs::is_regular_file(fs::path(path) / "config.json")) {
    throw std::runtime_error("--model=" + path + " has no config.json");
  }
}

void start_python(const WorkerOptions& options) {
  with_user_messages([&] {
    xllm_executor::PythonRuntime::start({options.python_executable, split_path(options.python_model_path)});
  });
}

std::unique_ptr<LoadedModel> load_model(const WorkerOptions& options, const RankConfig& config) {
  return with_user_messages([&] {
    share_threads(config);
    xllm_executor::LoadOptions load;
    load.model_path = options.model;
    const at::Device device = resolve_device(options, config);
    // Sets the current device of the serving thread for the whole run, so that no allocation goes to another device.
    if (device.has_index()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
    load.device = device.str();
    load.dtype = options.dtype == "auto" ? "" : options.dtype;
    load.kv_cache_dtype = options.kv_cache_dtype;
    load.max_model_len = options.max_model_len.value_or(0);
    load.progress = isatty(STDERR_FILENO) == 1 && config.rank == 0;
    ParallelArgs parallel;
    parallel.tp_rank(config.rank).tp_size(config.size).host(config.host).port(config.port);
    return options.model_impl == "native" ? load_native_model(load, parallel) : load_python_model(load, parallel);
  });
}

ServerInfo make_server_info(const WorkerOptions& options, const LoadedModel& model) {
  int64_t bytes_per_token = 0;  // of the layers that share the main page table
  int64_t bytes_per_state = 0;
  std::vector<WindowLayers> groups;
  for (const auto& layer : model.cache_specs()) {
    for (const xllm_executor::CacheSpec& spec : layer) {
      const bool is_paged = spec.kind == xllm_executor::CacheKind::kPaged;
      if (is_paged && options.enable_kv_groups && spec.group > 0) {
        groups.resize(std::max(groups.size(), static_cast<size_t>(spec.group)));
        WindowLayers& group = groups[static_cast<size_t>(spec.group - 1)];
        group.window = spec.window;
        group.bytes_per_token += spec.bytes_per_entry();
      } else {
        (is_paged ? bytes_per_token : bytes_per_state) += spec.bytes_per_entry();
      }
    }
  }
  ServerInfo info;
  info.model_type = model.args().model_type();
  info.dtype = dtype_name(model.dtype());
  info.device = model.device().str();
  info.vocab_size = model.args().vocab_size();
  // load_model has compared the option with the positions that the model can serve.
  info.max_model_len = options.max_model_len.value_or(model.args().max_position_embeddings());
  info.num_state_slots = bytes_per_state > 0 ? options.max_seqs_per_batch : 0;
  int64_t bytes_of_others = info.num_state_slots * bytes_per_state;
  info.kv_groups = choose_group_blocks(options, bytes_per_token, groups, bytes_of_others, info.max_model_len);
  for (size_t i = 0; i < groups.size(); ++i) {
    bytes_of_others += info.kv_groups[i].num_blocks * options.block_size * groups[i].bytes_per_token;
  }
  info.num_blocks = choose_num_blocks(options, bytes_per_token, bytes_of_others, info.max_model_len);
  info.block_size = options.block_size;
  info.eos_token_ids = model.args().eos_token_ids();
  return info;
}

std::unique_ptr<TensorModel> prepare_model(const WorkerOptions& options,
                                           const ServerInfo& info,
                                           LoadedModel& model,
                                           const std::optional<xllm_executor::TensorParallelGroup>& group) {
  return with_user_messages([&] { return model.prepare(options, info, make_kv_caches(model, info), group); });
}

nlohmann::json rank_info(const WorkerOptions& options, const ServerInfo& info, const LoadedModel& model) {
  nlohmann::json result = {{"model_impl", options.model_impl},
                           {"python_graph_backend", options.python_graph_backend},
                           {"enable_graph", options.enable_graph},
                           {"max_seqs_per_batch", options.max_seqs_per_batch},
                           {"max_tokens_per_batch", options.max_tokens_per_batch},
                           {"tp_backend", options.tp_backend},
                           {"dtype", info.dtype},
                           {"kv_cache_dtype", options.kv_cache_dtype},
                           {"device", at::DeviceTypeName(model.device().type(), /*lower_case=*/true)},
                           {"max_model_len", info.max_model_len},
                           {"num_blocks", info.num_blocks},
                           {"group_num_blocks", group_num_pages(info)},
                           {"block_size", info.block_size},
                           {"torch", TORCH_VERSION}};
  std::string contract =
      std::to_string(xllm_metadata::kContractVersionMajor) + "." + std::to_string(xllm_metadata::kContractVersionMinor);
  xllm_metadata::for_each_property_of<AttentionMetadata>(
      [&](auto property) { contract.append(1, ' ').append(property.name); });
  result["step_contract"] = contract;
  xllm_metadata::for_each_property(model.args(), [&](std::string_view name, const auto& value) {
    result["config " + std::string(name)] = to_json(value);
  });
  for (const auto& [name, digest] : with_user_messages([&] { return xllm_executor::checkpoint_digests(options.model); })) {
    result["weights " + name] = digest;
  }
  return result;
}

void report_python_error(const xllm_executor::PythonError& error) {
  if (is_user_error(error.type())) throw std::runtime_error(error.message());
  write_log(error.traceback());
}

}  // namespace xllm_worker
