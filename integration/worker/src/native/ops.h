// The compute ops of the native model. Each makes the same ATen calls with the same roundings as the torch
// implementation of the op of that name in xllm_models, so equal inputs give equal bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xllm_worker::native {

// T rows, N features, H heads, K kv heads, D head dim, P positions of the table, R rotary features.

// x [..., N], weight [N] -> [..., N]: normalized in fp32, rounded to x's dtype, then multiplied.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// Returns (rms_norm(x + residual), x + residual).
std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(const at::Tensor& x,
                                                      const at::Tensor& residual,
                                                      const at::Tensor& weight,
                                                      double eps);

// x = [gate, up] [..., 2N] -> silu(gate) * up.
at::Tensor silu_and_mul(const at::Tensor& x);

// x [..., N], weight [M, N] -> [..., M] (`linear` in xllm_models). An undefined bias means no bias.
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// Applies rotary embeddings to q [T, H, D] or k [T, K, D]. cos, sin: [T, 1, R / 2] of the same dtype.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

// Looks up (cos, sin) [T, 1, R / 2] in `dtype` for the positions [T] in the fp32 table [P, R].
std::tuple<at::Tensor, at::Tensor> rotary_angles(const at::Tensor& table,
                                                 const at::Tensor& positions,
                                                 at::ScalarType dtype);

}  // namespace xllm_worker::native
