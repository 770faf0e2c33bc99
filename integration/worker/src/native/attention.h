// Attention over the paged KV cache in ATen calls, the same sequence of calls as in xllm_attention's torch backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "xllm_executor/native_state.h"
#include "xllm_metadata/attention_metadata.h"

namespace xllm_worker::native {

using xllm_metadata::AttentionMetadata;

// Layers with equal shape and window share one plan per step.
using xllm_executor::AttentionLayer;

struct KvCache {
  at::Tensor k, v;  // [num_pages, page_size, K, D]
};

// The attention plan of one step for a group of equal layers. B sequences, T tokens, H heads, K kv heads, D head dim.
class AttentionPlan {
 public:
  virtual ~AttentionPlan() = default;

  // Attends with q [>= T, H, D] over the cache; writes every row of out, which has q's shape. Padding rows get 0.
  virtual void run(const at::Tensor& q, const KvCache& cache, at::Tensor& out) const = 0;
};

// Attends sequence by sequence, without padding.
std::unique_ptr<AttentionPlan> plan_ragged(const AttentionMetadata& metadata,
                                           const AttentionLayer& layer,
                                           int64_t page_size,
                                           at::ScalarType dtype);

// A decode step in the shapes of a graph for `num_rows` sequences: every row reads max_model_len keys. Padding rows
// have length 0.
std::unique_ptr<AttentionPlan> plan_dense_decode(const AttentionMetadata& metadata,
                                                 const AttentionLayer& layer,
                                                 int64_t page_size,
                                                 int64_t num_rows,
                                                 int64_t max_model_len);

// Writes the first T rows of k and v [>= T, K, D] to the cache slots [T] int64.
void append(const at::Tensor& slots, const at::Tensor& k, const at::Tensor& v, const KvCache& cache);

}  // namespace xllm_worker::native
