// A model from its checkpoint to its first step, whatever language it is written in: what both implementations share,
// and what each has to offer. The interpreter, which loads for both, is started here.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "options.h"
#include "protocol.h"
#include "ranks/place.h"
#include "torch_step_model.h"
#include "xllm/executor/causal_lm.h"
#include "xllm/executor/python_error.h"
#include "xllm/executor/tensor_parallel.h"
#include "xllm/metadata/model_args.h"

namespace xllm::worker {

// A model whose weights are in memory.
class LoadedModel {
 public:
  virtual ~LoadedModel() = default;

  virtual const ModelArgs& args() const = 0;
  virtual at::ScalarType dtype() const = 0;
  virtual at::Device device() const = 0;
  virtual std::vector<executor::CacheShape> cache_shapes() const = 0;  // one a layer

  // Makes it ready for its first step, warm-up included. Once. `group`: of its ranks, which all call this; absent when
  // it has one rank. caches: [layer] -> {k, v}.
  virtual std::unique_ptr<TensorModel> prepare(const WorkerOptions& options,
                                               const ServerInfo& info,
                                               std::vector<std::vector<at::Tensor>> caches,
                                               const std::optional<executor::TensorParallelGroup>& group) = 0;
};

// Throws std::runtime_error.
void check_checkpoint(const std::string& path);
void start_python(const WorkerOptions& options);

// After start_python. Throws std::exception with a message for the user: no such device, architecture, ...
std::unique_ptr<LoadedModel> load_model(const WorkerOptions& options, const RankPlace& place);
ServerInfo make_server_info(const WorkerOptions& options, const LoadedModel& model);
std::unique_ptr<TensorModel> prepare_model(const WorkerOptions& options,
                                           const ServerInfo& info,
                                           LoadedModel& model,
                                           const std::optional<executor::TensorParallelGroup>& group);

// What the ranks of a model must have in common.
nlohmann::json rank_info(const WorkerOptions& options, const ServerInfo& info, const LoadedModel& model);

// The two implementations.
std::unique_ptr<LoadedModel> load_python_model(const executor::LoadOptions& options, const ParallelArgs& parallel);
std::unique_ptr<LoadedModel> load_native_model(const executor::LoadOptions& options, const ParallelArgs& parallel);

// Runs the callable; a Python exception becomes a std::runtime_error with its message where that tells a user what to
// change, and stays what it is, its traceback on stderr, where it does not.
template <class Callable>
auto for_user(Callable&& callable);

void explain(const executor::PythonError& error);

template <class Callable>
auto for_user(Callable&& callable) {
  try {
    return callable();
  } catch (const executor::PythonError& error) {
    explain(error);
    throw;
  }
}

}  // namespace xllm::worker
