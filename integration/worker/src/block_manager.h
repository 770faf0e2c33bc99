// The KV cache's pages: who uses them, how a sequence's page table grows, and which pages sequences share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "prefix_cache.h"

namespace xllm::worker {

struct PrefixCacheCounts {
  int64_t num_queried_tokens = 0;  // of the sequences that began
  int64_t num_hit_tokens = 0;      // of those, the ones that were cached
  int64_t num_evicted_blocks = 0;
  int64_t num_cached_blocks = 0;  // now, in use or idle
};

// With a prefix cache, full pages are found again by their tokens. A page enters it when its keys and values are written,
// is never written again, and stays, when no sequence uses it any more, until its memory is wanted.
class BlockManager {
 public:
  BlockManager(int64_t num_blocks, int64_t block_size, bool enable_prefix_cache, PageHash hash = hash_page);

  int64_t num_blocks() const { return static_cast<int64_t>(num_users_.size()); }
  int64_t block_size() const { return block_size_; }
  int64_t num_slots() const { return num_blocks() * block_size_; }
  // Pages that no sequence uses; those that are cached are given up when they are wanted.
  int64_t num_free() const { return static_cast<int64_t>(free_.size()) + (cache_ ? cache_->num_idle() : 0); }

  // Gives `table`, which is empty, pages for all of `tokens`, cached ones first. Returns how many tokens those hold: whole
  // pages, and never the last token, which must be computed for its logits. Nothing, and nothing changed, when too few pages
  // are free.
  std::optional<int64_t> begin(std::vector<int32_t>& table, std::span<const int32_t> tokens);

  // Lets `table` hold `num_tokens` tokens. False, and nothing changed, when too few pages are free.
  bool grow(std::vector<int32_t>& table, int64_t num_tokens);

  // The keys and values of `tokens`, a sequence's first, are written, of which those of the first `num_before` already were
  // at the last call: their full pages enter the cache. Where an equal page is in it, `table` gets that one for its own.
  void written(std::vector<int32_t>& table, std::span<const int32_t> tokens, int64_t num_before);

  // Gives all pages of `table` back and empties it. Its cached pages stay cached.
  void release(std::vector<int32_t>& table);

  // As release, for a sequence whose pages are not to be trusted: none that it alone used and that no other continues
  // stays cached.
  void discard(std::vector<int32_t>& table);

  PrefixCacheCounts prefix_cache_counts() const;

 private:
  int64_t num_pages(int64_t num_tokens) const { return (num_tokens + block_size_ - 1) / block_size_; }
  int64_t& num_users(int32_t block) { return num_users_.at(static_cast<size_t>(block)); }
  std::vector<int32_t> find_prefix(std::span<const int32_t> tokens) const;
  int32_t take();
  // One user less. A page that is cached stays so where `keep` says it, or where others continue it.
  void leave(int32_t block, bool keep);
  void leave_all(std::vector<int32_t>& table, bool keep);

  int64_t block_size_;
  std::vector<int32_t> free_;  // not cached. A stack: the page freed last is warm in the caches
  std::vector<int64_t> num_users_;  // by block
  std::optional<PrefixCache> cache_;
  PrefixCacheCounts counts_;
};

}  // namespace xllm::worker
