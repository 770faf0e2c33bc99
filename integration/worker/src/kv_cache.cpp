#include "kv_cache.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace xllm_worker {

namespace {

constexpr int64_t kDefaultBytes = int64_t{1} << 30;

}  // namespace

int64_t choose_num_blocks(const WorkerOptions& options,
                          int64_t bytes_per_token,
                          int64_t bytes_of_states,
                          int64_t max_model_len) {
  const int64_t max_blocks = std::numeric_limits<int32_t>::max() / options.block_size;  // slots are int32
  if (options.num_blocks) {
    if (*options.num_blocks > max_blocks) {
      throw std::runtime_error("--num_blocks is " + std::to_string(*options.num_blocks) + "; the limit is " +
                               std::to_string(max_blocks) + " pages of " + std::to_string(options.block_size) +
                               " tokens, since slot numbers are int32");
    }
    return *options.num_blocks;
  }
  const int64_t bytes = options.kv_cache_memory ? options.kv_cache_memory->bytes : kDefaultBytes;
  const int64_t bytes_per_block = bytes_per_token * options.block_size;
  if (bytes - bytes_of_states < bytes_per_block) {
    const std::string states =
        bytes_of_states > 0 ? ", and the states and sliding windows of " +
                                  std::to_string(options.max_seqs_per_batch) +
                                  " sequences (--max_seqs_per_batch) take " + std::to_string(bytes_of_states)
                            : "";
    throw std::runtime_error("--kv_cache_memory is " + std::to_string(bytes) + " bytes; one page of " +
                             std::to_string(options.block_size) + " tokens takes " + std::to_string(bytes_per_block) +
                             states);
  }
  const int64_t blocks_per_seq = (max_model_len + options.block_size - 1) / options.block_size;
  const int64_t most = std::min(blocks_per_seq * options.max_seqs_per_batch, max_blocks);
  return bytes_per_block == 0 ? most : std::min((bytes - bytes_of_states) / bytes_per_block, most);
}

std::vector<KvGroup> choose_group_blocks(const WorkerOptions& options,
                                         int64_t bytes_per_token,
                                         std::span<const WindowLayers> groups,
                                         int64_t bytes_of_states,
                                         int64_t max_model_len) {
  const int64_t page = options.block_size;
  const int64_t blocks_per_seq = (max_model_len + page - 1) / page;
  // A running sequence holds the pages of a window, and one more while it enters the next page.
  const auto pages_of_window = [&](const WindowLayers& group) {
    return std::min(blocks_per_seq, WindowGroups::max_pages(group.window, page) + 1);
  };
  const int64_t bytes = (options.kv_cache_memory ? options.kv_cache_memory->bytes : kDefaultBytes) - bytes_of_states;
  double bytes_per_seq = static_cast<double>(blocks_per_seq * page * bytes_per_token);
  for (const WindowLayers& group : groups) {
    bytes_per_seq += static_cast<double>(pages_of_window(group) * page * group.bytes_per_token);
  }
  const double num_seqs = static_cast<double>(bytes) / bytes_per_seq;
  std::vector<KvGroup> result;
  for (const WindowLayers& group : groups) {
    const int64_t pages = pages_of_window(group);
    const int64_t chunks = (options.max_tokens_per_batch + page - 1) / page;
    const int64_t most = std::min(pages * options.max_seqs_per_batch + chunks, blocks_per_seq * options.max_seqs_per_batch);
    const int64_t share = options.num_blocks.value_or(static_cast<int64_t>(num_seqs * static_cast<double>(pages)));
    result.push_back({group.window, std::clamp(share, pages, std::max(pages, most))});
  }
  return result;
}

}  // namespace xllm_worker
