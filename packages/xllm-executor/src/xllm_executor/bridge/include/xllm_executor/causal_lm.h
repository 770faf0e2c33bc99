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

/// What the first dimensions of a cache tensor count.
enum class CacheKind {
  kPaged,  ///< [num_pages, page_size, *shape]: one entry per token, in the pages of a sequence
  kState,  ///< [num_slots, *shape]: one entry per sequence, in its state slot
};

/// Sizes of the caches, which the host chooses.
struct CacheSizes {
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t num_slots = 0;  ///< state slots; unused by models that keep only pages
  /// Pages of KV cache groups from 1 on; empty: all groups have num_pages, and one page table.
  std::vector<int64_t> group_num_pages = {};
};

/// One cache tensor that a layer needs.
struct CacheSpec {
  std::string name;  ///< "k", "v", "conv", "ssm", ...
  CacheKind kind = CacheKind::kPaged;
  std::vector<int64_t> shape;  ///< of one entry
  at::ScalarType dtype = at::ScalarType::Float;
  int64_t group = 0;   ///< KV cache group: its tensors have the same number of pages and share a page table
  int64_t window = 0;  ///< number of keys that a query of the group sees, its own included; 0: all

  /// Shape of the whole tensor.
  [[nodiscard]] std::vector<int64_t> tensor_shape(const CacheSizes& sizes) const;
  /// Bytes of one entry.
  [[nodiscard]] int64_t bytes_per_entry() const;
};

/// Options of PyCausalLM::load.
struct LoadOptions {
  std::string model_path = {};  ///< checkpoint directory: config.json and *.safetensors
  std::string device = "cpu";   ///< "cpu", "cuda", "cuda:1", ...
  std::string dtype = {};       ///< "float32", "bfloat16", "float16"; empty: the config's
  std::string kv_cache_dtype = "auto";  ///< "auto": the model's; "fp8_e4m3": with the checkpoint's scales
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
  /// The cache tensors that each layer needs on this rank. The host allocates them, and binds them in this order.
  [[nodiscard]] const std::vector<std::vector<CacheSpec>>& cache_specs() const;

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
