// Allocates the pages of KV cache groups with a sliding window, and frees the pages that have left the window.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace xllm_worker {

// A KV cache group from 1 on: its layers share a page table and a window.
struct KvGroup {
  int64_t window = 0;  // keys that a query sees, its own included
  int64_t num_blocks = 0;
};

// The page tables of one sequence, by group. A page that has left the window is kFreedBlock.
using GroupTables = std::vector<std::vector<int32_t>>;

class WindowGroups {
 public:
  static constexpr int32_t kFreedBlock = -1;

  struct Usage {
    KvGroup group;
    int64_t num_used = 0;   // pages in use now
    int64_t peak_used = 0;  // the most at any time
  };

  WindowGroups(std::span<const KvGroup> groups, int64_t block_size);

  // Most pages that `length` consecutive tokens touch.
  static int64_t max_pages(int64_t length, int64_t block_size) { return (length + block_size - 2) / block_size + 1; }

  // The number of tokens to which the free pages let a sequence with these tables grow. Empty: a new sequence.
  int64_t max_tokens(const GroupTables& tables) const;

  // Grows all tables to `num_tokens` tokens. Returns false and changes nothing when too few pages are free.
  bool grow(GroupTables& tables, int64_t num_tokens);

  // Frees the pages that no query from position `num_cached` on sees.
  void free_before_window(GroupTables& tables, int64_t num_cached);

  // Releases all pages and empties the tables.
  void free(GroupTables& tables);

  std::vector<Usage> usage() const;

 private:
  struct Group {
    KvGroup group;
    std::vector<int32_t> free_blocks;  // a stack
    int64_t peak_used = 0;
  };

  static int64_t num_used(const Group& group);

  int64_t block_size_;
  std::vector<Group> groups_;
};

}  // namespace xllm_worker
