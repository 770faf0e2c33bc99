// What the host programs hand to an executor: small tensors and a KV cache.
#pragma once

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <cstdint>
#include <vector>

#include "xllm_executor/causal_lm.h"

namespace hosts {

inline constexpr int64_t kPageSize = 4;
inline constexpr int64_t kNumPages = 16;

inline at::Tensor int32(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

// [num_pages, page_size, num_kv_heads, head_dim] twice a layer, zeros.
inline std::vector<std::vector<at::Tensor>> make_caches(const xllm_executor::PyCausalLM& model) {
  std::vector<std::vector<at::Tensor>> caches;
  for (const auto& shape : model.cache_shapes()) {
    const std::vector<int64_t> sizes = {kNumPages, kPageSize, shape.num_kv_heads, shape.head_dim};
    const auto options = at::TensorOptions().dtype(model.dtype()).device(model.device());
    caches.push_back({at::full(sizes, 0, options), at::full(sizes, 0, options)});
  }
  return caches;
}

}  // namespace hosts
