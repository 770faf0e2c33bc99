#include "ranks/rank_info.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "strict_json.h"

namespace xllm_worker {

namespace {

constexpr size_t kMaxNamed = 4;
constexpr size_t kMaxShown = 60;

std::string quoted(const nlohmann::json& info, const std::string& key) {
  return info.contains(key) ? dump_json(info.at(key), kMaxShown) : "absent";
}

}  // namespace

std::string describe_difference(const nlohmann::json& leader, const nlohmann::json& other, int64_t rank) {
  std::set<std::string> keys;
  for (const auto& [key, value] : leader.items()) keys.insert(key);
  for (const auto& [key, value] : other.items()) keys.insert(key);
  std::vector<std::string> different;
  for (const std::string& key : keys) {
    if (leader.contains(key) && other.contains(key) && leader.at(key) == other.at(key)) continue;
    different.push_back(key + " is " + quoted(other, key) + ", rank 0 has " + quoted(leader, key));
  }
  if (different.empty()) return "";
  std::string text = "rank " + std::to_string(rank) + " differs from rank 0: ";
  for (size_t i = 0; i < std::min(different.size(), kMaxNamed); ++i) text += (i == 0 ? "" : "; ") + different[i];
  if (different.size() > kMaxNamed) text += "; and " + std::to_string(different.size() - kMaxNamed) + " more";
  return text;
}

}  // namespace xllm_worker
