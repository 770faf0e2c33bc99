// Model configuration and tensor-parallel rank, as host and model exchange them. Names are xLLM's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xllm/metadata/property.h"

namespace xllm {

// Configuration of a loaded model. An optional is absent if the model's config lacks it.
struct ModelArgs {
  REFLECT_PROPERTIES();

  PROPERTY(std::string, model_type);
  PROPERTY(std::optional<std::vector<std::string>>, architectures);  // if model_type does not determine the class
  PROPERTY(std::string, dtype);
  PROPERTY(int64_t, vocab_size) = 0;
  PROPERTY(int64_t, hidden_size) = 0;
  PROPERTY(int64_t, intermediate_size) = 0;
  PROPERTY(int64_t, n_layers) = 0;
  PROPERTY(int64_t, n_heads) = 0;
  PROPERTY(std::optional<int64_t>, n_kv_heads);
  PROPERTY(int64_t, head_dim) = 0;
  PROPERTY(int64_t, max_position_embeddings) = 0;
  PROPERTY(double, rms_norm_eps) = 1e-6;
  PROPERTY(std::string, hidden_act) = "silu";
  PROPERTY(bool, attention_bias) = false;
  PROPERTY(bool, mlp_bias) = false;
  PROPERTY(bool, tie_word_embeddings) = false;
  PROPERTY(bool, use_sliding_window) = false;
  PROPERTY(int64_t, sliding_window) = 0;  // keys that a query sees, its own included; 0: all
  PROPERTY(int64_t, max_window_layers) = 0;
  PROPERTY(std::vector<std::string>, layer_types);
  PROPERTY(std::optional<double>, query_pre_attn_scalar);   // Gemma: attention is scaled by its inverse square root
  PROPERTY(std::optional<double>, final_logit_softcapping);  // Gemma
  PROPERTY(std::optional<int64_t>, num_experts);             // mixture of experts, with the next five
  PROPERTY(std::optional<int64_t>, num_experts_per_tok);
  PROPERTY(std::optional<int64_t>, moe_intermediate_size);
  PROPERTY(std::optional<int64_t>, decoder_sparse_step);
  PROPERTY(std::optional<bool>, norm_topk_prob);
  PROPERTY(std::optional<std::vector<int64_t>>, mlp_only_layers);
  PROPERTY(std::optional<int32_t>, bos_token_id);
  PROPERTY(std::vector<int32_t>, eos_token_ids);
  PROPERTY(std::optional<std::string>, own_config);  // JSON object: config keys of this family only

  PROPERTY(double, rope_theta) = 10000.0;
  PROPERTY(double, partial_rotary_factor) = 1.0;
  PROPERTY(std::optional<double>, rope_local_base_freq);  // theta of sliding layers
  PROPERTY(std::optional<std::string>, rope_scaling_rope_type);
  PROPERTY(std::optional<double>, rope_scaling_factor);
  PROPERTY(std::optional<int64_t>, rope_scaling_original_max_position_embeddings);
  PROPERTY(std::optional<double>, rope_scaling_low_freq_factor);
  PROPERTY(std::optional<double>, rope_scaling_high_freq_factor);
  PROPERTY(std::optional<double>, rope_scaling_attention_factor);
  PROPERTY(std::optional<double>, rope_scaling_beta_fast);
  PROPERTY(std::optional<double>, rope_scaling_beta_slow);
  PROPERTY(std::optional<double>, rope_scaling_mscale);
  PROPERTY(std::optional<double>, rope_scaling_mscale_all_dim);
  PROPERTY(std::optional<bool>, rope_scaling_truncate);
  PROPERTY(std::optional<std::vector<double>>, rope_scaling_short_factor);
  PROPERTY(std::optional<std::vector<double>>, rope_scaling_long_factor);
};

// Tensor-parallel rank and size, and the address at which the ranks rendezvous.
struct ParallelArgs {
  REFLECT_PROPERTIES();

  PROPERTY(int64_t, tp_rank) = 0;
  PROPERTY(int64_t, tp_size) = 1;
  PROPERTY(std::string, host) = "127.0.0.1";
  PROPERTY(int64_t, port) = 0;
};

}  // namespace xllm
