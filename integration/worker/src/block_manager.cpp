#include "block_manager.h"

#include <stdexcept>
#include <string>

namespace xllm::worker {

BlockManager::BlockManager(int64_t num_blocks, int64_t block_size) : block_size_(block_size) {
  if (num_blocks < 1 || block_size < 1) {
    throw std::invalid_argument("a KV cache of " + std::to_string(num_blocks) + " pages of " +
                                std::to_string(block_size) + " tokens; both must be at least 1");
  }
  is_free_.assign(static_cast<size_t>(num_blocks), true);
  free_.reserve(static_cast<size_t>(num_blocks));
  for (int64_t block = num_blocks - 1; block >= 0; --block) free_.push_back(static_cast<int32_t>(block));
}

bool BlockManager::grow(std::vector<int32_t>& table, int64_t num_tokens) {
  const int64_t wanted = (num_tokens + block_size_ - 1) / block_size_;
  const int64_t missing = wanted - static_cast<int64_t>(table.size());
  if (missing > num_free()) return false;
  for (int64_t i = 0; i < missing; ++i) {
    table.push_back(free_.back());
    free_.pop_back();
    is_free_[static_cast<size_t>(table.back())] = false;
  }
  return true;
}

void BlockManager::release(std::vector<int32_t>& table) {
  for (auto block = table.rbegin(); block != table.rend(); ++block) {
    if (is_free_.at(static_cast<size_t>(*block))) {
      throw std::logic_error("page " + std::to_string(*block) + " is freed twice");
    }
    is_free_[static_cast<size_t>(*block)] = true;
    free_.push_back(*block);
  }
  table.clear();
}

}  // namespace xllm::worker
