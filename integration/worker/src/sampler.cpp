#include "sampler.h"

#include <ATen/ops/max.h>
#include <ATen/ops/where.h>

#include <tuple>

#include "step_model.h"

namespace xllm::worker {

std::vector<int32_t> sample_greedy(const at::Tensor& logits) {
  if (logits.size(0) == 0) return {};
  // max() propagates NaN and gives the first of equal values.
  const auto [values, indices] = at::max(logits, /*dim=*/-1);
  const at::Tensor tokens =
      at::where(values.isnan(), static_cast<int64_t>(StepModel::kNotANumber), indices).to(at::kInt).cpu();
  const int32_t* data = tokens.const_data_ptr<int32_t>();
  return {data, data + tokens.numel()};
}

}  // namespace xllm::worker
