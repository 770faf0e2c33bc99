// Computes the number of KV cache pages and the maximum model length from the options.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "options.h"
#include "window_groups.h"

namespace xllm_worker {

// The number of pages: the option num_blocks, else the pages that fit into kv_cache_memory, at most as many as
// max_seqs_per_batch sequences of max_model_len use. `bytes_of_states` of that memory are for states and other KV
// cache groups. If no layer has a cache in these pages (bytes_per_token is 0), memory does not limit them. Throws
// std::runtime_error when the rest is less than one page.
int64_t choose_num_blocks(const WorkerOptions& options,
                          int64_t bytes_per_token,
                          int64_t bytes_of_states,
                          int64_t max_model_len);

// A KV cache group with a sliding window, and the bytes of one token in its caches.
struct WindowLayers {
  int64_t window = 0;
  int64_t bytes_per_token = 0;
};

// The pages of the groups from 1 on: those that max_seqs_per_batch sequences can hold at once, and no more than the
// option num_blocks. If kv_cache_memory is too small for that, the memory is split so that all groups run out of pages
// together when every sequence has max_model_len tokens. Each group has the pages of at least one sequence.
std::vector<KvGroup> choose_group_blocks(const WorkerOptions& options,
                                         int64_t bytes_per_token,
                                         std::span<const WindowLayers> groups,
                                         int64_t bytes_of_states,
                                         int64_t max_model_len);

}  // namespace xllm_worker
