// Builds what one step hands to the model: tokens, positions and the attention metadata, host mirrors included.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "xllm/metadata/attention_metadata.h"

namespace xllm::worker {

// One sequence of a step. It may have no new token, and no token at all.
struct BatchEntry {
  std::span<const int32_t> new_tokens;
  int64_t num_cached = 0;           // tokens before the new ones
  std::span<const int32_t> blocks;  // pages, enough for num_cached + new_tokens; further ones are ignored
  bool wants_logits = false;        // of its last new token
};

// All tensors are int32 and views of one buffer; on a CUDA device of two, the host's being pinned.
struct Batch {
  at::Tensor tokens;          // [T], device
  at::Tensor positions;       // [T], device
  at::Tensor logits_indices;  // [n], device: rows whose logits the step wants
  AttentionMetadata metadata;
};

// The copy to a CUDA device is asynchronous, ordered on the current stream; the host buffer's memory is not used for
// another batch before it is done.
Batch build_batch(std::span<const BatchEntry> entries, int64_t block_size, at::Device device);

}  // namespace xllm::worker
