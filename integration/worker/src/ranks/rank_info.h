// What all ranks of one model must have in common, and how a difference is told.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace xllm::worker {

// How the info (an object of plain values) of `rank` differ from rank 0's: "rank 1 differs from rank 0: dtype is
// \"float32\", rank 0 has \"bfloat16\"; ...". Empty when they are equal.
std::string describe_difference(const nlohmann::json& leader, const nlohmann::json& other, int64_t rank);

}  // namespace xllm::worker
