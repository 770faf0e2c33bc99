// Adapts the native model to LoadedModel: the Python loader provides the tensors, steps run in C++.
#include <utility>

#include "model_host.h"
#include "native/runner.h"
#include "xllm_executor/native_state.h"

namespace xllm_worker {

namespace {

class LoadedNativeModel : public LoadedModel {
 public:
  LoadedNativeModel(xllm_executor::NativeState state, const ParallelArgs& parallel)
      : args_(state.args), dtype_(state.dtype), device_(state.device), parallel_(parallel), state_(std::move(state)) {
    native::check_served(state_);
  }

  const ModelArgs& args() const override { return args_; }
  at::ScalarType dtype() const override { return dtype_; }
  at::Device device() const override { return device_; }

  std::vector<std::vector<xllm_executor::CacheSpec>> cache_specs() const override {
    std::vector<std::vector<xllm_executor::CacheSpec>> layers;
    for (const xllm_executor::AttentionLayer& layer : state_.layers) {
      std::vector<xllm_executor::CacheSpec>& specs = layers.emplace_back();
      for (const char* name : {"k", "v"}) {
        specs.push_back({.name = name, .shape = {layer.num_kv_heads, layer.head_dim}, .dtype = dtype_});
      }
    }
    return layers;
  }

  std::unique_ptr<TensorModel> prepare(const WorkerOptions& options,
                                       const ServerInfo& info,
                                       std::vector<std::vector<at::Tensor>> caches,
                                       const std::optional<xllm_executor::TensorParallelGroup>& group) override {
    native::Collectives collectives;
    if (group) collectives = native::Collectives(group->name(), parallel_.tp_rank(), parallel_.tp_size());
    std::vector<native::KvCache> kv;
    for (std::vector<at::Tensor>& layer : caches) kv.push_back({std::move(layer[0]), std::move(layer[1])});
    return std::make_unique<native::Runner>(native::CausalLM(std::move(state_), std::move(collectives)),
                                            std::move(kv),
                                            native::RunnerLimits{.max_num_seqs = options.max_seqs_per_batch,
                                                                 .max_num_tokens = options.max_tokens_per_batch,
                                                                 .max_model_len = info.max_model_len,
                                                                 .pad_to_graph_sizes = options.enable_graph});
  }

 private:
  ModelArgs args_;
  at::ScalarType dtype_;
  at::Device device_;
  ParallelArgs parallel_;
  xllm_executor::NativeState state_;
};

}  // namespace

std::unique_ptr<LoadedModel> load_native_model(const xllm_executor::LoadOptions& options, const ParallelArgs& parallel) {
  return std::make_unique<LoadedNativeModel>(xllm_executor::load_native_state(options, parallel), parallel);
}

}  // namespace xllm_worker
