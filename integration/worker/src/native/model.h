// Llama and Qwen3 in C++: the same ops in the same order, on the same tensors, as in xllm_models. Owns no KV cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "native/attention.h"
#include "native/collectives.h"
#include "xllm_executor/native_state.h"

namespace xllm_worker::native {

// The attention inputs of one step.
struct AttentionStep {
  at::Tensor slots;                                   // [T] int64
  std::vector<std::unique_ptr<AttentionPlan>> plans;  // one per group
};

// Throws std::runtime_error for an architecture or feature that the native model does not support.
void check_served(const xllm_executor::NativeState& state);

// T tokens of a step, H query heads, K kv heads, D head dim (heads counted on this rank).
class CausalLM {
 public:
  CausalLM(xllm_executor::NativeState state, Collectives collectives);

  // tokens, positions [T] int32 -> hidden [T, hidden].
  at::Tensor forward(const at::Tensor& tokens,
                     const at::Tensor& positions,
                     const AttentionStep& attention,
                     const std::vector<KvCache>& caches);

  // hidden [T, hidden] -> logits [n, vocab] of the rows `logits_indices` [n]; of all rows with nullopt.
  at::Tensor compute_logits(const at::Tensor& hidden, const std::optional<at::Tensor>& logits_indices);

  // The groups of layers with equal attention. An AttentionStep has one plan per group.
  const std::vector<AttentionLayer>& groups() const { return groups_; }

  at::ScalarType dtype() const { return dtype_; }
  int64_t vocab_size() const { return vocab_size_; }
  Collectives& collectives() { return collectives_; }

 private:
  struct Layer {
    size_t group = 0;
    AttentionLayer attention;
    at::Tensor input_norm, post_attention_norm;
    at::Tensor qkv, qkv_bias, o, o_bias;
    at::Tensor q_norm, k_norm;  // undefined: none
    at::Tensor gate_up, gate_up_bias, down, down_bias;
  };
  struct Rotation {
    at::Tensor cos, sin;
  };

  Layer make_layer(const xllm_executor::NativeState& state, size_t layer_id);
  at::Tensor embed(const at::Tensor& tokens);
  at::Tensor attend(const Layer& layer,
                    const at::Tensor& hidden,
                    const Rotation& rotation,
                    const AttentionStep& attention,
                    const KvCache& cache) const;
  at::Tensor sum_over_ranks(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

  Collectives collectives_;
  at::ScalarType dtype_;
  double rms_norm_eps_;
  int64_t vocab_size_;
  at::Tensor embedding_, rotary_table_, final_norm_, head_;
  std::vector<Layer> layers_;
  std::vector<AttentionLayer> groups_;
};

}  // namespace xllm_worker::native
