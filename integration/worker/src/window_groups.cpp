#include "window_groups.h"

#include <algorithm>
#include <limits>

namespace xllm_worker {

WindowGroups::WindowGroups(std::span<const KvGroup> groups, int64_t block_size) : block_size_(block_size) {
  for (const KvGroup& group : groups) {
    Group& added = groups_.emplace_back(Group{group, {}, 0});
    for (int64_t block = group.num_blocks; block-- > 0;) added.free_blocks.push_back(static_cast<int32_t>(block));
  }
}

int64_t WindowGroups::num_used(const Group& group) { return group.group.num_blocks - std::ssize(group.free_blocks); }

int64_t WindowGroups::max_tokens(const GroupTables& tables) const {
  int64_t result = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < groups_.size(); ++i) {
    const int64_t pages = tables.empty() ? 0 : std::ssize(tables[i]);
    result = std::min(result, (pages + std::ssize(groups_[i].free_blocks)) * block_size_);
  }
  return result;
}

bool WindowGroups::grow(GroupTables& tables, int64_t num_tokens) {
  if (num_tokens > max_tokens(tables)) return false;
  tables.resize(groups_.size());
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& group = groups_[i];
    while (std::ssize(tables[i]) * block_size_ < num_tokens) {
      tables[i].push_back(group.free_blocks.back());
      group.free_blocks.pop_back();
    }
    group.peak_used = std::max(group.peak_used, num_used(group));
  }
  return true;
}

void WindowGroups::free_before_window(GroupTables& tables, int64_t num_cached) {
  for (size_t i = 0; i < tables.size(); ++i) {
    // The next query, at position num_cached, sees the keys from this position on. Pages before it were freed earlier
    // up to the last one that is kFreedBlock.
    const int64_t first_key = std::max<int64_t>(0, num_cached - groups_[i].group.window + 1);
    for (int64_t page = std::min(first_key / block_size_, std::ssize(tables[i])); page-- > 0;) {
      int32_t& block = tables[i][static_cast<size_t>(page)];
      if (block == kFreedBlock) break;
      groups_[i].free_blocks.push_back(block);
      block = kFreedBlock;
    }
  }
}

void WindowGroups::free(GroupTables& tables) {
  for (size_t i = 0; i < tables.size(); ++i) {
    for (const int32_t block : tables[i]) {
      if (block != kFreedBlock) groups_[i].free_blocks.push_back(block);
    }
  }
  tables.clear();
}

std::vector<WindowGroups::Usage> WindowGroups::usage() const {
  std::vector<Usage> result;
  for (const Group& group : groups_) result.push_back({group.group, num_used(group), group.peak_used});
  return result;
}

}  // namespace xllm_worker
