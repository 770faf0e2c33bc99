// Chooses the next tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "step_model.h"

namespace xllm::worker {

// The most likely token of each row of logits [n, vocabulary]; ties go to the lowest id, and a row with NaN gives
// StepModel::kNotANumber. Waits for the device: the answer is needed on the host to build the next step.
std::vector<int32_t> sample_greedy(const at::Tensor& logits);

// What a row [vocabulary] of logits is; copies it to the host.
LogitsSummary summarize(const at::Tensor& row);

}  // namespace xllm::worker
