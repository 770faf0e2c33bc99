// The size of the KV cache.
#pragma once

#include <cstdint>

#include "options.h"

namespace xllm::worker {

// Pages that the options ask for: num_blocks as given, else as many as kv_cache_memory holds, but no more than
// max_seqs_per_batch sequences of max_model_len use. Throws std::runtime_error when the memory does not hold one page.
int64_t choose_num_blocks(const WorkerOptions& options, int64_t bytes_per_token, int64_t max_model_len);

// The longest sequence: the option, else the model's. Throws std::runtime_error when the option exceeds the model's.
int64_t choose_max_model_len(const WorkerOptions& options, int64_t max_position_embeddings);

}  // namespace xllm::worker
