/// @file
/// Version of the step contract that these headers describe. A test compares it with Python's CONTRACT_VERSION.
#pragma once

namespace xllm_metadata {

inline constexpr int kContractVersionMajor = 1;
inline constexpr int kContractVersionMinor = 0;

}  // namespace xllm_metadata
