/// @file
/// Model configuration and tensor-parallel rank, as host and model exchange them. Names are xLLM's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xllm_metadata/property.h"

namespace xllm_metadata {

/// Configuration of a loaded model. An optional is absent if the model's config lacks it.
struct ModelArgs {
  XLLM_METADATA_REFLECT();

  XLLM_METADATA_PROPERTY(std::string, model_type);
  XLLM_METADATA_PROPERTY(std::optional<std::vector<std::string>>, architectures);  ///< where model_type names no class
  XLLM_METADATA_PROPERTY(std::string, dtype);
  XLLM_METADATA_PROPERTY(int64_t, vocab_size) = 0;
  XLLM_METADATA_PROPERTY(int64_t, hidden_size) = 0;
  XLLM_METADATA_PROPERTY(int64_t, intermediate_size) = 0;
  XLLM_METADATA_PROPERTY(int64_t, n_layers) = 0;
  XLLM_METADATA_PROPERTY(int64_t, n_heads) = 0;
  XLLM_METADATA_PROPERTY(std::optional<int64_t>, n_kv_heads);
  XLLM_METADATA_PROPERTY(int64_t, head_dim) = 0;
  XLLM_METADATA_PROPERTY(int64_t, max_position_embeddings) = 0;
  XLLM_METADATA_PROPERTY(double, rms_norm_eps) = 1e-6;
  XLLM_METADATA_PROPERTY(std::string, hidden_act) = "silu";
  XLLM_METADATA_PROPERTY(bool, attention_bias) = false;
  XLLM_METADATA_PROPERTY(bool, mlp_bias) = false;
  XLLM_METADATA_PROPERTY(bool, tie_word_embeddings) = false;
  XLLM_METADATA_PROPERTY(bool, use_sliding_window) = false;
  XLLM_METADATA_PROPERTY(int64_t, sliding_window) = 0;  ///< keys that a query sees, its own included; 0: all
  XLLM_METADATA_PROPERTY(int64_t, max_window_layers) = 0;
  XLLM_METADATA_PROPERTY(std::vector<std::string>, layer_types);
  XLLM_METADATA_PROPERTY(std::optional<double>, query_pre_attn_scalar);   ///< Gemma: 1 / scale squared
  XLLM_METADATA_PROPERTY(std::optional<double>, final_logit_softcapping);  ///< Gemma
  XLLM_METADATA_PROPERTY(std::optional<int64_t>, num_experts);             ///< mixture of experts, with the next five
  XLLM_METADATA_PROPERTY(std::optional<int64_t>, num_experts_per_tok);
  XLLM_METADATA_PROPERTY(std::optional<int64_t>, moe_intermediate_size);
  XLLM_METADATA_PROPERTY(std::optional<int64_t>, decoder_sparse_step);
  XLLM_METADATA_PROPERTY(std::optional<bool>, norm_topk_prob);
  XLLM_METADATA_PROPERTY(std::optional<std::vector<int64_t>>, mlp_only_layers);
  XLLM_METADATA_PROPERTY(std::optional<int32_t>, bos_token_id);
  XLLM_METADATA_PROPERTY(std::vector<int32_t>, eos_token_ids);
  XLLM_METADATA_PROPERTY(std::optional<std::string>, own_config);  ///< JSON object: config keys of this family only

  XLLM_METADATA_PROPERTY(double, rope_theta) = 10000.0;
  XLLM_METADATA_PROPERTY(double, partial_rotary_factor) = 1.0;
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_local_base_freq);  ///< theta of sliding layers
  XLLM_METADATA_PROPERTY(std::optional<std::string>, rope_scaling_rope_type);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_factor);
  XLLM_METADATA_PROPERTY(std::optional<int64_t>, rope_scaling_original_max_position_embeddings);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_low_freq_factor);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_high_freq_factor);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_attention_factor);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_beta_fast);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_beta_slow);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_mscale);
  XLLM_METADATA_PROPERTY(std::optional<double>, rope_scaling_mscale_all_dim);
  XLLM_METADATA_PROPERTY(std::optional<bool>, rope_scaling_truncate);
  XLLM_METADATA_PROPERTY(std::optional<std::vector<double>>, rope_scaling_short_factor);
  XLLM_METADATA_PROPERTY(std::optional<std::vector<double>>, rope_scaling_long_factor);
};

/// Tensor-parallel rank and size, and the address at which the ranks rendezvous.
struct ParallelArgs {
  XLLM_METADATA_REFLECT();

  XLLM_METADATA_PROPERTY(int64_t, tp_rank) = 0;
  XLLM_METADATA_PROPERTY(int64_t, tp_size) = 1;
  XLLM_METADATA_PROPERTY(std::string, host) = "127.0.0.1";
  XLLM_METADATA_PROPERTY(int64_t, port) = 0;
};

}  // namespace xllm_metadata
