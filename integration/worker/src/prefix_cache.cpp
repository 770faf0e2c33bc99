#include "prefix_cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace xllm_worker {

namespace {

[[noreturn]] void misused(int32_t block, const char* how) {
  throw std::logic_error("page " + std::to_string(block) + " " + how);
}

}  // namespace

uint64_t hash_page(uint64_t parent_hash, std::span<const int32_t> tokens) {
  uint64_t hash = parent_hash;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;  // mixes high bits into the low bits, which select the bucket
  }
  return hash;
}

uint64_t PrefixCache::hash_of(int32_t parent, std::span<const int32_t> tokens) const {
  constexpr uint64_t kRoot = 0x243F6A8885A308D3u;
  return hash_(parent == kNoParent ? kRoot : at(parent).hash, tokens);
}

std::optional<int32_t> PrefixCache::find(int32_t parent, std::span<const int32_t> tokens) const {
  const auto [begin, end] = by_hash_.equal_range(hash_of(parent, tokens));
  for (auto entry = begin; entry != end; ++entry) {
    const Page& page = at(entry->second);
    if (page.parent == parent && std::ranges::equal(page.tokens, tokens)) return entry->second;
  }
  return std::nullopt;
}

void PrefixCache::insert(int32_t parent, std::span<const int32_t> tokens, int32_t block) {
  Page& page = at(block);
  if (page.is_cached) misused(block, "is inserted twice");
  if (parent != kNoParent) {
    if (!at(parent).is_cached) misused(parent, "is passed as a parent but is not cached");
    ++at(parent).num_children;
  }
  page = {.is_cached = true,
          .parent = parent,
          .num_children = 0,
          .hash = hash_of(parent, tokens),
          .tokens = {tokens.begin(), tokens.end()},
          .idle = std::nullopt};
  by_hash_.emplace(page.hash, block);
}

void PrefixCache::erase(int32_t block) {
  Page& page = at(block);
  if (!page.is_cached || page.num_children > 0) misused(block, "cannot be erased: it has children or is not cached");
  if (page.idle) idle_.erase(*page.idle);
  const auto [begin, end] = by_hash_.equal_range(page.hash);
  by_hash_.erase(std::find_if(begin, end, [&](const auto& entry) { return entry.second == block; }));
  if (page.parent != kNoParent) --at(page.parent).num_children;
  page = {};
}

std::vector<int32_t> PrefixCache::erase_with_descendants(int32_t block) {
  std::vector<int32_t> found{block};
  for (size_t next = 0; next < found.size(); ++next) {
    if (!has_children(found[next])) continue;
    for (int32_t other = 0; other < static_cast<int32_t>(pages_.size()); ++other) {
      if (at(other).is_cached && at(other).parent == found[next]) found.push_back(other);
    }
  }
  std::ranges::reverse(found);
  for (const int32_t page : found) erase(page);
  return found;
}

void PrefixCache::set_idle(int32_t block) {
  if (!at(block).is_cached || at(block).idle) misused(block, "cannot become idle: it is idle already or not cached");
  at(block).idle = idle_.insert(idle_.end(), block);
}

void PrefixCache::set_used(int32_t block) {
  if (!at(block).idle) misused(block, "cannot become used: it is not idle");
  idle_.erase(*at(block).idle);
  at(block).idle.reset();
}

int32_t PrefixCache::evict() {
  const int32_t block = idle_.front();
  erase(block);
  return block;
}

}  // namespace xllm_worker
