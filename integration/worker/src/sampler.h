// Chooses the next tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace xllm::worker {

// The most likely token of each row of logits [n, vocabulary]; ties go to the lowest id, and a row with NaN gives
// StepModel::kNotANumber. Waits for the device: the answer is needed on the host to build the next step.
std::vector<int32_t> sample_greedy(const at::Tensor& logits);

}  // namespace xllm::worker
