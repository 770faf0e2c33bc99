// Computes the number of KV cache pages and the maximum model length from the options.
#pragma once

#include <cstdint>

#include "options.h"

namespace xllm_worker {

// The number of pages: the option num_blocks, else the pages that fit into kv_cache_memory, at most as many as
// max_seqs_per_batch sequences of max_model_len use. `bytes_of_states` of that memory are for states. Throws
// std::runtime_error when the rest is less than one page.
int64_t choose_num_blocks(const WorkerOptions& options,
                          int64_t bytes_per_token,
                          int64_t bytes_of_states,
                          int64_t max_model_len);

}  // namespace xllm_worker
