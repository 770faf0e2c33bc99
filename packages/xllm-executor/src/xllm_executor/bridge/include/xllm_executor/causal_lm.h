/// @file
/// `PyCausalLM`: a handle of a Python model.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xllm_executor/state_dict.h"
#include "xllm_metadata/model_args.h"

namespace xllm_executor {

using xllm_metadata::ModelArgs;
using xllm_metadata::ParallelArgs;

/// Shape of one layer's paged KV cache: tensors k and v of [num_pages, page_size, num_kv_heads, head_dim].
struct CacheShape {
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
};

/// Options of PyCausalLM::load.
struct LoadOptions {
  std::string model_path = {};  ///< checkpoint directory: config.json and *.safetensors
  std::string device = "cpu";   ///< "cpu", "cuda", "cuda:1", ...
  std::string dtype = {};       ///< "float32", "bfloat16", "float16"; empty: the config's
  int64_t max_model_len = 0;    ///< longest context to serve, which rope may depend on; 0: unknown
  bool progress = false;        ///< show a progress bar on stderr
};

/// A model in Python. The handle may be destroyed on any thread; a moved-from one throws UsageError.
class PyCausalLM {
 public:
  /// Builds the model that args.architectures names, or args.model_type where that is absent. Weights are not set yet.
  /// args.dtype is the dtype of the weights. Throws PythonError for every Python exception.
  static PyCausalLM create(const ModelArgs& args, const ParallelArgs& parallel, const std::string& device);

  /// Builds the model of a checkpoint directory and loads its weights. Throws PythonError for every Python exception.
  static PyCausalLM load(const LoadOptions& options, const ParallelArgs& parallel = {});

  /// Sets every parameter from the views and uses each tensor once; `xllm_models` documents the errors. Loading again
  /// copies in place, so captured graphs stay valid. The views are not used after the call.
  void load_weights(const std::vector<const StateDict*>& state_dicts);

  /// Logits [n, vocab] of rows `logits_indices` [n] of hidden states [T, hidden]; of all rows when it is absent. For
  /// a host whose execute returns hidden states.
  [[nodiscard]] at::Tensor logits(const at::Tensor& hidden, const std::optional<at::Tensor>& logits_indices) const;

  [[nodiscard]] const ModelArgs& args() const;
  [[nodiscard]] at::ScalarType dtype() const;
  [[nodiscard]] c10::Device device() const;
  /// One entry per layer: this rank's share.
  [[nodiscard]] const std::vector<CacheShape>& cache_shapes() const;

  PyCausalLM(PyCausalLM&&) noexcept;
  PyCausalLM& operator=(PyCausalLM&&) noexcept;
  ~PyCausalLM();

 private:
  friend class PyExecutor;
  struct Impl;
  explicit PyCausalLM(std::unique_ptr<Impl> impl) noexcept;
  [[nodiscard]] Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xllm_executor
