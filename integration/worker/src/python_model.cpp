// Adapts the Python model to LoadedModel: one execute call into embedded Python per step.
#include <utility>

#include "line_io.h"
#include "model_host.h"
#include "xllm_executor/causal_lm.h"
#include "xllm_executor/executor.h"

namespace xllm_worker {

namespace {

using xllm_executor::PyCausalLM;
using xllm_executor::PyExecutor;

xllm_executor::Config executor_config(const WorkerOptions& options, const ServerInfo& info, bool progress,
                                      bool cut_collectives) {
  return {.python_graph_backend = options.python_graph_backend,
          .graph_cut_collectives = cut_collectives,
          .progress = progress,
          .kv_groups = !info.kv_groups.empty(),
          .max_tokens_per_batch = options.max_tokens_per_batch,
          .max_model_len = info.max_model_len};
}

class PythonTensorModel : public TensorModel {
 public:
  PythonTensorModel(PyCausalLM model,
                    const WorkerOptions& options,
                    const ServerInfo& info,
                    const std::vector<std::vector<at::Tensor>>& caches,
                    std::optional<xllm_executor::TensorParallelGroup> group,
                    bool progress)
      : model_(std::move(model)),
        executor_(model_,
                  // No CUDA graph can hold gloo's collectives.
                  executor_config(options, info, progress,
                                  group && model_.device().is_cuda() && options.tp_backend == "gloo"),
                  options.max_seqs_per_batch),
        group_(std::move(group)) {
    executor_.bind_kv_caches(caches);
    executor_.warmup();
  }

  at::Tensor execute(const Batch& batch) override {
    try {
      return executor_.execute({batch.tokens, batch.positions, batch.metadata, batch.logits_indices}).logits;
    } catch (const xllm_executor::PythonError& error) {
      write_log(error.traceback());
      throw;
    }
  }

  std::string stats_json() override { return executor_.stats_json(); }
  std::string traffic_json() override { return group_ ? group_->traffic_json() : "{}"; }
  void shutdown() override { executor_.shutdown(); }

 private:
  PyCausalLM model_;
  PyExecutor executor_;
  std::optional<xllm_executor::TensorParallelGroup> group_;
};

class LoadedPythonModel : public LoadedModel {
 public:
  // progress: show the warm-up's progress on stderr.
  LoadedPythonModel(PyCausalLM model, bool progress) : model_(std::move(model)), progress_(progress) {}

  const ModelArgs& args() const override { return model_->args(); }
  at::ScalarType dtype() const override { return model_->dtype(); }
  at::Device device() const override { return model_->device(); }
  std::vector<std::vector<xllm_executor::CacheSpec>> cache_specs() const override { return model_->cache_specs(); }

  std::unique_ptr<TensorModel> prepare(const WorkerOptions& options,
                                       const ServerInfo& info,
                                       std::vector<std::vector<at::Tensor>> caches,
                                       const std::optional<xllm_executor::TensorParallelGroup>& group) override {
    PyCausalLM model = std::move(model_.value());
    model_.reset();
    return std::make_unique<PythonTensorModel>(std::move(model), options, info, caches, group, progress_);
  }

 private:
  std::optional<PyCausalLM> model_;
  bool progress_;
};

}  // namespace

std::unique_ptr<LoadedModel> load_python_model(const xllm_executor::LoadOptions& options, const ParallelArgs& parallel) {
  // One rank speaks for all: they capture the same graphs at the same time.
  return std::make_unique<LoadedPythonModel>(PyCausalLM::load(options, parallel), parallel.tp_rank() == 0);
}

}  // namespace xllm_worker
