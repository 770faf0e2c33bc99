// The version of the step contract that these headers describe; the Python package has the same in CONTRACT_VERSION.
#pragma once

namespace xllm {

inline constexpr int kContractVersionMajor = 1;
inline constexpr int kContractVersionMinor = 0;

}  // namespace xllm
