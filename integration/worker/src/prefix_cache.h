// The prefix cache: maps token prefixes to full KV pages, and evicts the least recently used page.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace xllm_worker {

// The hash of a page, from its parent's hash and its own tokens. A match is confirmed by comparing parent and tokens.
using PageHash = uint64_t (*)(uint64_t parent_hash, std::span<const int32_t> tokens);

uint64_t hash_page(uint64_t parent_hash, std::span<const int32_t> tokens);

// Pages form a forest: the parent of a page holds the tokens just before it. Two pages are equal when all their tokens
// from the start of the sequence are equal. The cache never holds two equal pages.
//
// A page is idle while no sequence uses it. A sequence that uses a page uses its parents too, and frees its pages from
// last to first. Therefore the page that has been idle longest has no children.
class PrefixCache {
 public:
  static constexpr int32_t kNoParent = -1;  // parent of a sequence's first page

  PrefixCache(int64_t num_blocks, PageHash hash) : hash_(hash), pages_(static_cast<size_t>(num_blocks)) {}

  // Finds the child page of `parent` with these `tokens`.
  std::optional<int32_t> find(int32_t parent, std::span<const int32_t> tokens) const;

  // Adds `block`, which is in use, as the child page of `parent` with these `tokens`. The cache must have no equal
  // page.
  void insert(int32_t parent, std::span<const int32_t> tokens, int32_t block);

  // Removes a page without children.
  void erase(int32_t block);

  // Removes a page and all pages below it: their keys and values depend on its tokens. Returns them, children first.
  std::vector<int32_t> erase_with_descendants(int32_t block);

  void set_idle(int32_t block);
  void set_used(int32_t block);

  // Removes and returns the page that has been idle longest. Needs num_idle() > 0.
  int32_t evict();

  bool contains(int32_t block) const { return at(block).is_cached; }
  bool has_children(int32_t block) const { return at(block).num_children > 0; }
  int64_t num_blocks() const { return static_cast<int64_t>(by_hash_.size()); }
  int64_t num_idle() const { return static_cast<int64_t>(idle_.size()); }

 private:
  struct Page {
    bool is_cached = false;
    int32_t parent = kNoParent;
    int64_t num_children = 0;
    uint64_t hash = 0;
    std::vector<int32_t> tokens;
    std::optional<std::list<int32_t>::iterator> idle;  // its entry in idle_
  };

  const Page& at(int32_t block) const { return pages_.at(static_cast<size_t>(block)); }
  Page& at(int32_t block) { return pages_.at(static_cast<size_t>(block)); }
  uint64_t hash_of(int32_t parent, std::span<const int32_t> tokens) const;

  PageHash hash_;
  std::vector<Page> pages_;  // by block
  std::unordered_multimap<uint64_t, int32_t> by_hash_;
  std::list<int32_t> idle_;  // least recently used first
};

}  // namespace xllm_worker
