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
inline constexpr int64_t kNumSlots = 8;

inline at::Tensor int32(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

// The cache tensors of each layer, zeros.
inline std::vector<std::vector<at::Tensor>> make_caches(const xllm_executor::PyCausalLM& model) {
  std::vector<std::vector<at::Tensor>> caches;
  for (const auto& layer : model.cache_specs()) {
    std::vector<at::Tensor>& tensors = caches.emplace_back();
    for (const xllm_executor::CacheSpec& spec : layer) {
      const auto shape = spec.tensor_shape({.num_pages = kNumPages, .page_size = kPageSize, .num_slots = kNumSlots});
      tensors.push_back(at::full(shape, 0, at::TensorOptions().dtype(spec.dtype).device(model.device())));
    }
  }
  return caches;
}

}  // namespace hosts
