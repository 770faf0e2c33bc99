// Compares the values that must be equal on all ranks of a model.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace xllm_worker {

// Describes how the info of `rank` (a flat JSON object) differs from rank 0's: "rank 1 differs from rank 0: dtype is
// \"float32\", rank 0 has \"bfloat16\"; ...". Empty when they are equal.
std::string describe_difference(const nlohmann::json& leader, const nlohmann::json& other, int64_t rank);

}  // namespace xllm_worker
