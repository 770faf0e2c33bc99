// `PyExecutor`: runs a Python model's steps. Bind the KV cache once, then call execute once per step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "xllm_executor/causal_lm.h"
#include "xllm_metadata/attention_metadata.h"

namespace xllm_executor {

using xllm_metadata::AttentionMetadata;

// Options of `xllm_executor.ExecutorConfig` by name. Python checks names, types and ranges.
using Config = std::map<std::string, std::variant<bool, int64_t, double, std::string>>;

// One thread at a time may use it; stats_json and metrics may also be called from other threads during a step. All
// steps run on one stream, or each step's stream waits for the stream of the previous step.
class PyExecutor {
 public:
  // Throws PythonError for an option that Python refuses.
  PyExecutor(const PyCausalLM& model, const Config& config, int64_t max_seqs_per_batch);

  // Binds the KV cache: per layer its tensors in slot order (k, v, ...). Call it once, before the first execute.
  void bind_kv_caches(const std::vector<std::vector<at::Tensor>>& caches);

  // Compiles kernels and captures graphs, so that the first request does not wait for them.
  void warmup();

  // Runs one step. tokens and positions are int32 [T] on the model's device. With logits_indices (int32 or int64 [n])
  // the result is logits [n, vocab] in the model's dtype, without it hidden states [T, hidden].
  // Inputs must be ready on the calling thread's current stream of that device and stay unmodified until that stream
  // has passed the step. The result is ordered on the same stream and valid until the next execute. The current device
  // does not matter and is not changed. Throws PythonError for an exception in the step; the executor remains usable.
  [[nodiscard]] at::Tensor execute(const at::Tensor& tokens,
                                   const at::Tensor& positions,
                                   const AttentionMetadata& metadata,
                                   const std::optional<at::Tensor>& logits_indices);

  // `ModelExecutor.stats()` as JSON.
  [[nodiscard]] std::string stats_json() const;

  // Metrics by dotted name: every number in stats() ("steps.eager", "eager_reasons.graphs_off"), "time.executes" and
  // "time.execute_seconds" (number of calls and host time spent in them), "memory.resident_bytes" of the process, and
  // on CUDA "memory.device_allocated_bytes" and "memory.device_reserved_bytes".
  [[nodiscard]] std::map<std::string, double> metrics() const;

  // Frees the executor's graphs and buffers. Later calls throw std::runtime_error.
  void shutdown();

  PyExecutor(PyExecutor&&) noexcept;
  PyExecutor& operator=(PyExecutor&&) noexcept;
  ~PyExecutor();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xllm_executor
