#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "block_manager.h"
#include "core_probe.h"

namespace xllm_worker::probe {

using nlohmann::json;

namespace {

uint64_t constant_hash(uint64_t, std::span<const int32_t>) { return 7; }

struct Holder {
  std::vector<int32_t> tokens;
  std::vector<int32_t> table;
  int64_t num_cached = 0;
};

using Holders = std::map<std::string, Holder>;

bool begin(BlockManager& blocks, Holders& holders, const json& op) {
  if (holders.contains(op.at(1))) return false;
  Holder holder{op.at(2), {}, 0};
  const auto num_cached = blocks.allocate(holder.table, holder.tokens);
  if (!num_cached) return false;
  holder.num_cached = *num_cached;
  holders.emplace(op.at(1), std::move(holder));
  return true;
}

bool compute(BlockManager& blocks, Holder& holder, int64_t at_most) {
  const int64_t num_new = std::min(at_most, std::ssize(holder.tokens) - holder.num_cached);
  const int64_t num_before = holder.num_cached;
  holder.num_cached += num_new;
  const auto computed = std::span(holder.tokens).first(static_cast<size_t>(holder.num_cached));
  blocks.cache_full_blocks(holder.table, computed, num_before);
  return num_new > 0;
}

bool append(BlockManager& blocks, Holder& holder, int32_t token) {
  const int64_t length = std::ssize(holder.tokens);
  if (holder.num_cached < length || !blocks.grow(holder.table, length + 1)) return false;
  holder.tokens.push_back(token);
  return true;
}

bool apply(BlockManager& blocks, Holders& holders, const json& op) {
  const std::string& kind = op.at(0).get_ref<const std::string&>();
  if (kind == "begin") return begin(blocks, holders, op);
  const auto found = holders.find(op.at(1));
  if (found == holders.end()) return false;
  Holder& holder = found->second;
  if (kind == "compute") return compute(blocks, holder, op.at(2));
  if (kind == "append") return append(blocks, holder, op.at(2));
  if (kind == "release") {
    blocks.free(holder.table);
  } else {
    blocks.discard(holder.table);
  }
  holders.erase(found);
  return true;
}

}  // namespace

json probe_blocks(const json& input) {
  BlockManager blocks(input.at("num_blocks"), input.at("block_size"), /*enable_prefix_cache=*/false);
  std::map<std::string, std::vector<int32_t>> tables;
  json results = json::array();
  for (const json& op : input.at("ops")) {
    std::vector<int32_t>& table = tables[op.at(1)];
    bool ok = true;
    if (op.at(0) == "grow") {
      ok = blocks.grow(table, op.at(2));
    } else {
      blocks.free(table);
    }
    results.push_back({{"ok", ok}, {"table", table}, {"num_free", blocks.num_free()}});
  }
  return results;
}

json probe_prefixes(const json& input) {
  BlockManager blocks(input.at("num_blocks"),
                      input.at("block_size"),
                      /*enable_prefix_cache=*/true,
                      input.at("hashes_collide") ? constant_hash : hash_page);
  Holders holders;
  json results = json::array();
  for (const json& op : input.at("ops")) {
    const bool ok = apply(blocks, holders, op);
    const PrefixCacheCounts counts = blocks.prefix_cache_counts();
    json tables = json::object();
    for (const auto& [name, holder] : holders) tables[name] = holder.table;
    const auto holder = holders.find(op.at(1));
    results.push_back({{"ok", ok},
                       {"tables", tables},
                       {"num_cached", holder == holders.end() ? 0 : holder->second.num_cached},
                       {"num_free", blocks.num_free()},
                       {"num_queried_tokens", counts.num_queried_tokens},
                       {"num_hit_tokens", counts.num_hit_tokens},
                       {"num_evicted_blocks", counts.num_evicted_blocks},
                       {"num_cached_blocks", counts.num_cached_blocks}});
  }
  return results;
}

}  // namespace xllm_worker::probe
