// Finds full pages by the tokens whose keys and values they hold, and says which of them goes first when memory is wanted.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace xllm::worker {

// The hash of a page, of its parent's and its own tokens. Only finds candidates: tokens and parents decide.
using PageHash = uint64_t (*)(uint64_t parent_hash, std::span<const int32_t> tokens);

uint64_t hash_page(uint64_t parent_hash, std::span<const int32_t> tokens);

// A forest: a page's parent holds the tokens just before its own, so equal pages are those with equal tokens from the
// sequence's beginning on. No two pages in it are equal.
//
// A page is idle while no sequence uses it. Whoever uses a page uses its parents, and pages become idle from a sequence's
// end on; so the page that has been idle longest never has children.
class PrefixCache {
 public:
  static constexpr int32_t kNoPage = -1;  // the parent of a sequence's first page

  PrefixCache(int64_t num_blocks, PageHash hash) : hash_(hash), pages_(static_cast<size_t>(num_blocks)) {}

  // The page that holds `tokens` after those of `parent`.
  std::optional<int32_t> find(int32_t parent, std::span<const int32_t> tokens) const;

  // `block`, which is in use, holds `tokens` after those of `parent`. No equal page is here.
  void insert(int32_t parent, std::span<const int32_t> tokens, int32_t block);

  // Takes out a page without children.
  void erase(int32_t block);

  void set_idle(int32_t block);
  void set_used(int32_t block);

  // Takes out the page that has been idle longest, of which there must be one.
  int32_t evict();

  bool holds(int32_t block) const { return at(block).is_held; }
  bool has_children(int32_t block) const { return at(block).num_children > 0; }
  int64_t num_blocks() const { return static_cast<int64_t>(by_hash_.size()); }
  int64_t num_idle() const { return static_cast<int64_t>(idle_.size()); }

 private:
  struct Page {
    bool is_held = false;
    int32_t parent = kNoPage;
    int64_t num_children = 0;
    uint64_t hash = 0;
    std::vector<int32_t> tokens;
    std::optional<std::list<int32_t>::iterator> idle;  // its place among the idle pages
  };

  const Page& at(int32_t block) const { return pages_.at(static_cast<size_t>(block)); }
  Page& at(int32_t block) { return pages_.at(static_cast<size_t>(block)); }
  uint64_t hash_of(int32_t parent, std::span<const int32_t> tokens) const;

  PageHash hash_;
  std::vector<Page> pages_;  // by block
  std::unordered_multimap<uint64_t, int32_t> by_hash_;
  std::list<int32_t> idle_;  // the longest idle first
};

}  // namespace xllm::worker
