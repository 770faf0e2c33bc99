// Internal: what this side tells Python of the step contract it was compiled against.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace xllm::executor {

// (major, minor).
[[nodiscard]] std::pair<int, int> contract_version();

// (name, kind, optional) of every property of AttentionMetadata; kinds as `xllm_metadata.check_contract` knows them.
[[nodiscard]] std::vector<std::tuple<std::string, std::string, bool>> describe_contract();

// A function of the libtorch that this program is linked with.
[[nodiscard]] void* linked_torch_symbol();

}  // namespace xllm::executor
