// Encodes a step's batch entries as bytes, which rank 0 sends to the other ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "batch_builder.h"

namespace xllm_worker {

std::string encode_step(std::span<const BatchEntry> entries);

// Owns the memory that the entries refer to. Throws std::runtime_error for truncated bytes.
class DecodedStep {
 public:
  explicit DecodedStep(std::string_view bytes);

  std::span<const BatchEntry> entries() const { return entries_; }

 private:
  std::vector<int32_t> numbers_;
  std::vector<BatchEntry> entries_;
};

}  // namespace xllm_worker
