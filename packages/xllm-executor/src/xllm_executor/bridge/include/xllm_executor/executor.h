/// @file
/// `PyExecutor`: runs a Python model's steps. Bind the KV cache once, then call execute once per step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xllm_executor/causal_lm.h"
#include "xllm_executor/config.h"
#include "xllm_executor/metrics.h"
#include "xllm_metadata/attention_metadata.h"

namespace xllm_executor {

using xllm_metadata::AttentionMetadata;

/// Inputs of one step of T tokens. They must be ready on the calling thread's current stream of the model's device, and
/// stay unmodified until that stream has passed the step.
struct StepInput {
  at::Tensor tokens;                         ///< [T] int32, on the model's device
  at::Tensor positions;                      ///< [T] int32, on the model's device
  AttentionMetadata metadata;                ///< of the same step
  std::optional<at::Tensor> logits_indices;  ///< [n] int32 or int64: rows to compute logits of; absent: hidden states
};

/// Outputs of one step, ordered on the stream of the call and valid until the next execute. What was not asked for is
/// undefined.
struct StepOutput {
  at::Tensor logits;         ///< [n, vocab] in the model's dtype, with logits_indices
  at::Tensor hidden_states;  ///< [T, hidden] in the model's dtype, without them
};

/// Runs the steps of one model. One thread at a time may use it; stats_json and metrics may also be called from other
/// threads during a step. All steps run on one stream, or each step's stream waits for the stream of the previous step.
/// A moved-from executor throws UsageError.
class PyExecutor {
 public:
  /// @throws PythonError for an option or a limit that Python refuses.
  PyExecutor(const PyCausalLM& model, const Config& config, int64_t max_seqs_per_batch);

  /// Binds the KV cache: per layer its tensors in slot order (k, v, ...). Call it once, before the first execute.
  /// @throws PythonError for a wrong number of layers, shape, dtype or device, or a second call.
  void bind_kv_caches(const std::vector<std::vector<at::Tensor>>& caches);

  /// Compiles kernels and captures graphs, so that the first request does not wait for them.
  /// @throws PythonError before bind_kv_caches, or when a capture fails; OutOfMemory when memory is exhausted.
  void warmup();

  /// Runs one step. The current device does not matter and is not changed.
  /// @throws RefusedStep when the inputs are wrong or beyond the limits.
  /// @throws OutOfMemory when memory is exhausted, PythonError for other exceptions in the step. The executor remains
  ///     usable in all cases.
  [[nodiscard]] StepOutput execute(const StepInput& input);

  /// `ModelExecutor.stats()` as JSON.
  [[nodiscard]] std::string stats_json() const;

  /// Steps, eager steps, graph misses and plans since the start; calls of execute and host time spent in them; graphs;
  /// memory of process and devices. docs/embedding.md lists the names.
  [[nodiscard]] std::vector<Metric> metrics() const;

  /// Frees the executor's graphs and buffers. Later calls throw UsageError.
  void shutdown();

  PyExecutor(PyExecutor&&) noexcept;
  PyExecutor& operator=(PyExecutor&&) noexcept;
  ~PyExecutor();

 private:
  struct Impl;
  [[nodiscard]] Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xllm_executor
