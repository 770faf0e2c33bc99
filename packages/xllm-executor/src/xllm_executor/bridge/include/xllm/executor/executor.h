// The model executor as C++ sees it: bind the KV cache once, then one call a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "xllm/executor/causal_lm.h"
#include "xllm/metadata/attention_metadata.h"

namespace xllm::executor {

// The keys and values of `xllm_executor.ExecutorConfig`; Python checks them.
using Config = std::map<std::string, std::variant<bool, int64_t, double, std::string>>;

// For one thread at a time; stats_json and metrics may be called by any thread beside a step. Steps come on one stream,
// or each on a stream that waits for the one of the step before.
class PyExecutor {
 public:
  // Throws PythonError when the config is refused.
  PyExecutor(const PyCausalLM& model, const Config& config, int64_t max_seqs_per_batch);

  // Hands over the KV cache: for each layer its tensors in slot order (k, v, ...). Once, before the first execute.
  void bind_kv_caches(const std::vector<std::vector<at::Tensor>>& caches);

  // Makes everything that a first request would otherwise wait for.
  void warmup();

  // Runs one step. tokens and positions are int32 [T] on the model's device. With logits_indices (int32 or int64 [n])
  // the result is logits [n, vocab] in the model's dtype, without it hidden states [T, hidden].
  // Inputs must be ready on the calling thread's current stream of that device, on which the result is ordered, and must
  // stay unmodified until that stream has passed the step. Which device is current does not matter, and stays. The
  // result is valid until the next execute.
  // Throws PythonError for an exception in the step; the executor remains usable.
  [[nodiscard]] at::Tensor execute(const at::Tensor& tokens,
                                   const at::Tensor& positions,
                                   const AttentionMetadata& metadata,
                                   const std::optional<at::Tensor>& logits_indices);

  // `ModelExecutor.stats()` as JSON.
  [[nodiscard]] std::string stats_json() const;

  // Health as plain numbers: everything numeric in stats() under dotted names ("steps.eager", "eager_reasons.graphs_off"),
  // "time.executes" and "time.execute_seconds" (calls so far and the host's time in them), "memory.resident_bytes" of the
  // process, and on CUDA "memory.device_allocated_bytes" and "memory.device_reserved_bytes".
  [[nodiscard]] std::map<std::string, double> metrics() const;

  // Frees what the executor holds in Python. Calls after it throw std::runtime_error.
  void shutdown();

  PyExecutor(PyExecutor&&) noexcept;
  PyExecutor& operator=(PyExecutor&&) noexcept;
  ~PyExecutor();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xllm::executor
