// The compute ops of a model, each the same sequence of ATen calls and roundings as the torch implementation of the op
// of that name in xllm_models: equal inputs give equal bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xllm::worker::native {

// T rows, N features, H heads, K kv heads, D head dim, P positions of the table, R rotary features.

// x [..., N], weight [N] -> [..., N]: normed in fp32, rounded, then multiplied.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// The norm of x + residual, and the sum.
std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(const at::Tensor& x,
                                                      const at::Tensor& residual,
                                                      const at::Tensor& weight,
                                                      double eps);

// x = [gate, up] [..., 2N] -> silu(gate) * up.
at::Tensor silu_and_mul(const at::Tensor& x);

// The product with a weight (`linear` there): x [..., N], weight [M, N]; an undefined bias is none.
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// Rotates one of q [T, H, D] or k [T, K, D] by cos, sin [T, 1, R / 2] of its dtype.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

// (cos, sin) [T, 1, R / 2] of the positions [T], from the fp32 table [P, R], in `dtype`.
std::tuple<at::Tensor, at::Tensor> rotary_angles(const at::Tensor& table,
                                                 const at::Tensor& positions,
                                                 at::ScalarType dtype);

}  // namespace xllm::worker::native
