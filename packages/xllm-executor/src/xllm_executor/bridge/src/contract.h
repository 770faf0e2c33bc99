// Internal: describes the step contract that this program was compiled against.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace xllm_executor {

// (major, minor).
[[nodiscard]] std::pair<int, int> contract_version();

// (name, type, optional) of every property of AttentionMetadata; types as `xllm_metadata.check_contract` expects them.
[[nodiscard]] std::vector<std::tuple<std::string, std::string, bool>> describe_contract();

// The address of a function in the libtorch that this program is linked with.
[[nodiscard]] void* linked_torch_symbol();

}  // namespace xllm_executor
