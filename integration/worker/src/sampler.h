// Samples the next tokens from logits, and summarizes logits for tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "step_model.h"

namespace xllm_worker {

// Greedy sampling: the argmax of each row of logits [n, vocabulary]. Ties go to the lowest id; a row with NaN gives
// StepModel::kNotANumber. Synchronizes with the device: the host needs the tokens to build the next step.
std::vector<int32_t> sample_greedy(const at::Tensor& logits);

// Digest and largest values of a row [vocabulary] of logits. Copies the row to the host.
LogitsSummary summarize(const at::Tensor& row);

}  // namespace xllm_worker
