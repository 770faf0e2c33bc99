#include "native/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sub.h>

namespace xllm_worker::native {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor normed = wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps);
  return (weight * normed.to(x.scalar_type())).contiguous();
}

std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(const at::Tensor& x,
                                                      const at::Tensor& residual,
                                                      const at::Tensor& weight,
                                                      double eps) {
  at::Tensor total = (x + residual).contiguous();
  return {rms_norm(total, weight, eps), total};
}

at::Tensor silu_and_mul(const at::Tensor& x) {
  const int64_t half = x.size(-1) / 2;
  return (at::silu(x.narrow(-1, 0, half)) * x.narrow(-1, half, half)).contiguous();
}

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t half = cos.size(-1);
  const at::Tensor first = x.narrow(-1, 0, half);
  const at::Tensor second = x.narrow(-1, half, half);
  at::Tensor out = x.new_empty(x.sizes());
  at::Tensor out_first = out.narrow(-1, 0, half);
  at::Tensor out_second = out.narrow(-1, half, half);
  at::sub_out(out_first, first * cos, second * sin);
  at::add_out(out_second, second * cos, first * sin);
  const int64_t rest = x.size(-1) - 2 * half;
  out.narrow(-1, 2 * half, rest).copy_(x.narrow(-1, 2 * half, rest));
  return out;
}

std::tuple<at::Tensor, at::Tensor> rotary_angles(const at::Tensor& table,
                                                 const at::Tensor& positions,
                                                 at::ScalarType dtype) {
  // Rounded to the model's dtype before the multiplication, as in xllm_models.
  const std::vector<at::Tensor> parts = table.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, -1);
  return {parts[0], parts[1]};
}

}  // namespace xllm_worker::native
