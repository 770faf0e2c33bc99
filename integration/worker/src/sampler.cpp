#include "sampler.h"

#include <ATen/ops/max.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <span>
#include <tuple>

namespace xllm_worker {

std::vector<int32_t> sample_greedy(const at::Tensor& logits) {
  if (logits.size(0) == 0) return {};
  // at::max propagates NaN and returns the first index of equal values.
  const auto [values, indices] = at::max(logits, /*dim=*/-1);
  // masked_fill passes the scalar to the kernel. at::where would copy it to the device, which synchronizes.
  const at::Tensor tokens = indices.masked_fill(values.isnan(), StepModel::kNotANumber).to(at::kInt).cpu();
  const int32_t* data = tokens.const_data_ptr<int32_t>();
  return {data, data + tokens.numel()};
}

namespace {

constexpr size_t kNumTop = 4;

// FNV-1a, 64 bits.
std::string digest(std::span<const unsigned char> bytes) {
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  char text[17];
  std::snprintf(text, sizeof(text), "%016lx", static_cast<unsigned long>(hash));
  return text;
}

}  // namespace

LogitsSummary summarize(const at::Tensor& row) {
  const at::Tensor host = row.cpu().contiguous();
  const at::Tensor wide = host.to(at::kFloat);
  const std::span values(wide.const_data_ptr<float>(), static_cast<size_t>(wide.numel()));
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(std::min(kNumTop, order.size()));
  std::partial_sort(order.begin(), end, order.end(), [&](int32_t a, int32_t b) {
    const float x = values[static_cast<size_t>(a)], y = values[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  LogitsSummary summary{digest({static_cast<const unsigned char*>(host.const_data_ptr()), host.nbytes()}), {}};
  for (auto id = order.begin(); id != end; ++id) summary.top.emplace_back(*id, values[static_cast<size_t>(*id)]);
  return summary;
}

}  // namespace xllm_worker
