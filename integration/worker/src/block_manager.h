// The KV cache's pages: which are free, and how a sequence's page table grows.
#pragma once

#include <cstdint>
#include <vector>

namespace xllm::worker {

class BlockManager {
 public:
  BlockManager(int64_t num_blocks, int64_t block_size);

  int64_t num_blocks() const { return static_cast<int64_t>(is_free_.size()); }
  int64_t block_size() const { return block_size_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_slots() const { return num_blocks() * block_size_; }

  // Lets `table` hold `num_tokens` tokens. False, and nothing changed, when too few pages are free.
  bool grow(std::vector<int32_t>& table, int64_t num_tokens);

  // Gives all pages of `table` back and empties it.
  void release(std::vector<int32_t>& table);

 private:
  int64_t block_size_;
  std::vector<int32_t> free_;  // a stack: the page freed last is warm in the caches
  std::vector<bool> is_free_;
};

}  // namespace xllm::worker
