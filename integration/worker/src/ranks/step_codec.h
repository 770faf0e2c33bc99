// A step's description as bytes, from rank 0 to the others.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "batch_builder.h"

namespace xllm::worker {

std::string encode_step(std::span<const BatchEntry> entries);

// Owns what the entries refer to. Throws std::runtime_error for bytes that encode_step did not make.
class DecodedStep {
 public:
  explicit DecodedStep(std::string_view bytes);

  std::span<const BatchEntry> entries() const { return entries_; }

 private:
  std::vector<int32_t> numbers_;
  std::vector<BatchEntry> entries_;
};

}  // namespace xllm::worker
