// Builds the model inputs of one step: tokens, positions and the attention metadata with its CPU copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "xllm_metadata/attention_metadata.h"

namespace xllm_worker {

using xllm_metadata::AttentionMetadata;

// One sequence of a step. Both num_cached and new_tokens may be empty.
struct BatchEntry {
  std::span<const int32_t> new_tokens;
  int64_t num_cached = 0;           // tokens before the new ones
  std::span<const int32_t> blocks;  // pages for num_cached + new_tokens; extra pages are ignored
  bool wants_logits = false;        // of its last new token
  std::vector<std::span<const int32_t>> group_blocks = {};  // the same of KV cache groups from 1 on; below 0: freed
  int32_t state_slot = -1;          // of a model whose layers keep a state per sequence
};

// All tensors are views of one int32 buffer. On a CUDA device there are two buffers: a pinned one on the host, one on
// the device.
struct Batch {
  at::Tensor tokens;          // [T], device
  at::Tensor positions;       // [T], device
  at::Tensor logits_indices;  // [n], device: rows whose logits the step wants
  AttentionMetadata metadata;
};

// The copy to a CUDA device is asynchronous on the current stream. PyTorch's pinned-memory allocator reuses the host
// buffer only after the copy has completed. `has_states`: the model's layers keep states, so the metadata gets their
// slots. `num_groups`: KV cache groups from 1 on, whose page tables the metadata gets. Throws std::exception for
// inconsistent entries.
Batch build_batch(std::span<const BatchEntry> entries, int64_t block_size, at::Device device, bool has_states = false,
                  int64_t num_groups = 0);

}  // namespace xllm_worker
