/// @file
/// Version of the step contract that these headers describe. A test compares it with Python's CONTRACT_VERSION.
#pragma once

namespace xllm_metadata {

/// A change of major breaks hosts.
inline constexpr int kContractVersionMajor = 1;
/// A change of minor adds fields.
inline constexpr int kContractVersionMinor = 2;

}  // namespace xllm_metadata
