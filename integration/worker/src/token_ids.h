// Checks that the token ids of a step are in the model's vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace xllm_worker {

// Throws std::invalid_argument for the first id outside [0, vocab_size), with the message of xllm_executor.
// tokens: [T] int32 on the CPU.
void check_token_ids(const at::Tensor& tokens, int64_t vocab_size);

}  // namespace xllm_worker
