#include "block_manager.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace xllm_worker {

BlockManager::BlockManager(int64_t num_blocks, int64_t block_size, bool enable_prefix_cache, PageHash hash,
                           std::span<const KvGroup> groups)
    : block_size_(block_size), windows_(groups, block_size) {
  if (enable_prefix_cache && !groups.empty()) throw std::invalid_argument("a prefix cache with several KV cache groups");
  if (num_blocks < 1 || block_size < 1) {
    throw std::invalid_argument("a KV cache of " + std::to_string(num_blocks) + " pages of " +
                                std::to_string(block_size) + " tokens; both must be at least 1");
  }
  ref_counts_.assign(static_cast<size_t>(num_blocks), 0);
  free_blocks_.reserve(static_cast<size_t>(num_blocks));
  for (int64_t block = num_blocks - 1; block >= 0; --block) free_blocks_.push_back(static_cast<int32_t>(block));
  if (enable_prefix_cache) cache_.emplace(num_blocks, hash);
}

std::vector<int32_t> BlockManager::find_prefix(std::span<const int32_t> tokens) const {
  std::vector<int32_t> found;
  if (!cache_ || tokens.empty()) return found;
  const size_t size = static_cast<size_t>(block_size_);
  for (size_t end = size; end < tokens.size(); end += size) {
    const int32_t parent = found.empty() ? PrefixCache::kNoParent : found.back();
    const auto block = cache_->find(parent, tokens.subspan(end - size, size));
    if (!block) break;
    found.push_back(*block);
  }
  return found;
}

std::optional<int64_t> BlockManager::allocate(std::vector<int32_t>& table, std::span<const int32_t> tokens) {
  std::vector<int32_t> found = find_prefix(tokens);
  const auto num_found = std::ssize(found);
  // A hit on an idle page takes it from the free pages.
  const auto num_idle = std::ranges::count_if(found, [&](int32_t block) { return ref_count(block) == 0; });
  if (num_pages(std::ssize(tokens)) - num_found > num_free() - num_idle) return std::nullopt;
  for (const int32_t block : found) {
    if (ref_count(block)++ == 0) cache_->set_used(block);
  }
  table = std::move(found);
  grow(table, std::ssize(tokens));
  if (cache_) {
    counts_.num_queried_tokens += std::ssize(tokens);
    counts_.num_hit_tokens += num_found * block_size_;
  }
  return num_found * block_size_;
}

bool BlockManager::grow(std::vector<int32_t>& table, int64_t num_tokens) {
  const int64_t missing = num_pages(num_tokens) - std::ssize(table);
  if (missing > num_free()) return false;
  for (int64_t i = 0; i < missing; ++i) table.push_back(allocate_block());
  return true;
}

int32_t BlockManager::allocate_block() {
  int32_t block = 0;
  if (free_blocks_.empty()) {
    block = cache_->evict();
    ++counts_.num_evicted_blocks;
  } else {
    block = free_blocks_.back();
    free_blocks_.pop_back();
  }
  ref_count(block) = 1;
  return block;
}

void BlockManager::cache_full_blocks(std::vector<int32_t>& table, std::span<const int32_t> tokens, int64_t num_before) {
  if (!cache_) return;
  const size_t size = static_cast<size_t>(block_size_);
  for (size_t i = static_cast<size_t>(num_before) / size; i < tokens.size() / size; ++i) {
    const int32_t parent = i == 0 ? PrefixCache::kNoParent : table[i - 1];
    const auto page = tokens.subspan(i * size, size);
    const auto equal = cache_->find(parent, page);
    if (!equal) {
      cache_->insert(parent, page, table[i]);
      continue;
    }
    // Keeps the invariant that a user of a page also uses its parents: then an idle page has no child in use and can be
    // evicted.
    if (ref_count(*equal)++ == 0) cache_->set_used(*equal);
    unref(table[i], /*keep=*/true);
    table[i] = *equal;
  }
}

void BlockManager::unref(int32_t block, bool keep) {
  if (ref_count(block) == 0) throw std::logic_error("page " + std::to_string(block) + " is freed twice");
  if (--ref_count(block) > 0) return;
  if (cache_ && cache_->contains(block)) {
    if (keep || cache_->has_children(block)) return cache_->set_idle(block);
    cache_->erase(block);
  }
  free_blocks_.push_back(block);
}

void BlockManager::unref_all(std::vector<int32_t>& table, bool keep) {
  for (auto block = table.rbegin(); block != table.rend(); ++block) unref(*block, keep);
  table.clear();
}

void BlockManager::free(std::vector<int32_t>& table) { unref_all(table, /*keep=*/true); }

void BlockManager::discard(std::vector<int32_t>& table) { unref_all(table, /*keep=*/false); }

void BlockManager::uncache(const std::vector<int32_t>& table) {
  if (!cache_) return;
  for (const int32_t block : table) {
    if (!cache_->contains(block)) continue;
    for (const int32_t page : cache_->erase_with_descendants(block)) {
      if (ref_count(page) == 0) free_blocks_.push_back(page);
    }
  }
}

PrefixCacheCounts BlockManager::prefix_cache_counts() const {
  PrefixCacheCounts counts = counts_;
  if (cache_) counts.num_cached_blocks = cache_->num_blocks();
  return counts;
}

}  // namespace xllm_worker
