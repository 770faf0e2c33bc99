// Allocates KV cache pages to sequences, with reference counts for pages that sequences share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "prefix_cache.h"
#include "window_groups.h"

namespace xllm_worker {

struct PrefixCacheCounts {
  int64_t num_queried_tokens = 0;  // of all admitted sequences
  int64_t num_hit_tokens = 0;      // of those, found in the cache
  int64_t num_evicted_blocks = 0;
  int64_t num_cached_blocks = 0;  // now, in use or not
};

// With a prefix cache, full pages are found again by their tokens. A page enters the cache once its keys and values are
// written, and is not written again. A page with reference count 0 stays cached until it is evicted for its memory.
class BlockManager {
 public:
  // `groups`: the KV cache groups with page tables of their own. The prefix cache must be off then: a cached prefix would
  // lack the pages that have left the window.
  BlockManager(int64_t num_blocks, int64_t block_size, bool enable_prefix_cache, PageHash hash = hash_page,
               std::span<const KvGroup> groups = {});

  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  int64_t block_size() const { return block_size_; }
  int64_t num_slots() const { return num_blocks() * block_size_; }
  // Pages with reference count 0, cached ones included: these are evicted on demand.
  int64_t num_free() const { return static_cast<int64_t>(free_blocks_.size()) + (cache_ ? cache_->num_idle() : 0); }

  // Fills the empty `table` with pages for all of `tokens`, cached pages first. Returns the number of cached tokens:
  // whole pages, without the last token, which is computed for its logits. Returns nullopt and changes nothing when too
  // few pages are free.
  std::optional<int64_t> allocate(std::vector<int32_t>& table, std::span<const int32_t> tokens);

  // Grows `table` to `num_tokens` tokens. Returns false and changes nothing when too few pages are free.
  bool grow(std::vector<int32_t>& table, int64_t num_tokens);

  // Puts the full pages of `tokens` into the cache, once their keys and values are written. `tokens` are all computed
  // tokens of a sequence; the first `num_before` were passed in the last call. If the cache has an equal page, `table`
  // gets that page instead.
  void cache_full_blocks(std::vector<int32_t>& table, std::span<const int32_t> tokens, int64_t num_before);

  // Releases all pages of `table` and empties it. Cached pages stay cached.
  void free(std::vector<int32_t>& table);

  // As free, for a sequence of a failed step, whose last pages may not be written: evicts its pages that no other
  // sequence uses and that have no child page.
  void discard(std::vector<int32_t>& table);

  // Takes the pages of `table`, and all cached pages that follow them, out of the cache: their keys and values are wrong.
  // Sequences that use such a page must free it.
  void uncache(const std::vector<int32_t>& table);

  PrefixCacheCounts prefix_cache_counts() const;

  WindowGroups& windows() { return windows_; }
  const WindowGroups& windows() const { return windows_; }

 private:
  int64_t num_pages(int64_t num_tokens) const { return (num_tokens + block_size_ - 1) / block_size_; }
  int64_t& ref_count(int32_t block) { return ref_counts_.at(static_cast<size_t>(block)); }
  std::vector<int32_t> find_prefix(std::span<const int32_t> tokens) const;
  int32_t allocate_block();
  // Decrements the reference count. At 0, a cached page stays cached if `keep` is set or it has child pages.
  void unref(int32_t block, bool keep);
  void unref_all(std::vector<int32_t>& table, bool keep);

  int64_t block_size_;
  std::vector<int32_t> free_blocks_;  // not cached. A stack: the page freed last may still be in the L2 cache
  std::vector<int64_t> ref_counts_;  // by block
  std::optional<PrefixCache> cache_;
  PrefixCacheCounts counts_;
  WindowGroups windows_;
};

}  // namespace xllm_worker
