#include "token_ids.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>

namespace xllm_worker {

void check_token_ids(const at::Tensor& tokens, int64_t vocab_size) {
  const std::span ids(tokens.const_data_ptr<int32_t>(), static_cast<size_t>(tokens.numel()));
  const auto wrong = std::ranges::find_if(ids, [&](int32_t id) { return id < 0 || id >= vocab_size; });
  if (wrong == ids.end()) return;
  throw std::invalid_argument("tokens[" + std::to_string(wrong - ids.begin()) + "] is " + std::to_string(*wrong) +
                              "; the vocabulary has " + std::to_string(vocab_size) + " ids, 0 to " +
                              std::to_string(vocab_size - 1));
}

}  // namespace xllm_worker
