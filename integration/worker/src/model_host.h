// Loads a model and prepares it for its first step: the interface of the Python and the native implementation, and the
// code that they share. Starts the Python interpreter, which loads the weights for both.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "options.h"
#include "protocol.h"
#include "ranks/rank_config.h"
#include "torch_step_model.h"
#include "xllm_executor/causal_lm.h"
#include "xllm_executor/errors.h"
#include "xllm_executor/tensor_parallel.h"
#include "xllm_metadata/model_args.h"

namespace xllm_worker {

using xllm_metadata::ModelArgs;
using xllm_metadata::ParallelArgs;

// A model whose weights are in memory.
class LoadedModel {
 public:
  virtual ~LoadedModel() = default;

  virtual const ModelArgs& args() const = 0;
  virtual at::ScalarType dtype() const = 0;
  virtual at::Device device() const = 0;
  virtual std::vector<std::vector<xllm_executor::CacheSpec>> cache_specs() const = 0;  // per layer

  // Prepares the first step, warm-up included. Call once. caches: [layer], in the order of cache_specs. All ranks of `group` call this;
  // nullopt with one rank.
  virtual std::unique_ptr<TensorModel> prepare(const WorkerOptions& options,
                                               const ServerInfo& info,
                                               std::vector<std::vector<at::Tensor>> caches,
                                               const std::optional<xllm_executor::TensorParallelGroup>& group) = 0;
};

// Throws std::runtime_error.
void check_checkpoint(const std::string& path);
void start_python(const WorkerOptions& options);

// Call after start_python. Throws std::exception with a message for the user, for example an unknown device.
std::unique_ptr<LoadedModel> load_model(const WorkerOptions& options, const RankConfig& config);
ServerInfo make_server_info(const WorkerOptions& options, const LoadedModel& model);
std::unique_ptr<TensorModel> prepare_model(const WorkerOptions& options,
                                           const ServerInfo& info,
                                           LoadedModel& model,
                                           const std::optional<xllm_executor::TensorParallelGroup>& group);

// The values that must be equal on all ranks: options, model configuration, contract fields and weight digests.
nlohmann::json rank_info(const WorkerOptions& options, const ServerInfo& info, const LoadedModel& model);

// The Python implementation and the native one.
std::unique_ptr<LoadedModel> load_python_model(const xllm_executor::LoadOptions& options, const ParallelArgs& parallel);
std::unique_ptr<LoadedModel> load_native_model(const xllm_executor::LoadOptions& options, const ParallelArgs& parallel);

// Runs the callable. A Python exception that explains a user error becomes a std::runtime_error with its message alone.
// Any other one is a bug: its traceback goes to stderr, and it is rethrown.
template <class Callable>
auto with_user_messages(Callable&& callable);

void report_python_error(const xllm_executor::PythonError& error);

template <class Callable>
auto with_user_messages(Callable&& callable) {
  try {
    return callable();
  } catch (const xllm_executor::PythonError& error) {
    report_python_error(error);
    throw;
  }
}

}  // namespace xllm_worker
