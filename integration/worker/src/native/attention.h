// Attention over the paged KV cache in ATen calls: the arithmetic of xllm_attention's torch backend, call for call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "xllm/executor/native_state.h"
#include "xllm/metadata/attention_metadata.h"

namespace xllm::worker::native {

// Layers of equal shape and window share one plan of a step.
using executor::AttentionLayer;

struct KvCache {
  at::Tensor k, v;  // [num_pages, page_size, K, D]
};

// How one step attends in the layers of a group. B sequences, T tokens, H heads, K kv heads, D head dim.
class AttentionPlan {
 public:
  virtual ~AttentionPlan() = default;

  // q [>= T, H, D] over the cache -> out of q's shape, every row written: rows of no live token get 0.
  virtual void run(const at::Tensor& q, const KvCache& cache, at::Tensor& out) const = 0;
};

// Sequence by sequence over real tokens only.
std::unique_ptr<AttentionPlan> plan_ragged(const AttentionMetadata& metadata,
                                           const AttentionLayer& layer,
                                           int64_t page_size,
                                           at::ScalarType dtype);

// A decode step in the shapes of a graph for `num_rows` sequences: every row reads as many keys as the longest sequence
// may have. Rows beyond the step's are empty.
std::unique_ptr<AttentionPlan> plan_dense_decode(const AttentionMetadata& metadata,
                                                 const AttentionLayer& layer,
                                                 int64_t page_size,
                                                 int64_t num_rows,
                                                 int64_t max_model_len);

// Writes the first rows of k and v [>= T, K, D] to the step's slots [T] int64.
void append(const at::Tensor& slots, const at::Tensor& k, const at::Tensor& v, const KvCache& cache);

}  // namespace xllm::worker::native
