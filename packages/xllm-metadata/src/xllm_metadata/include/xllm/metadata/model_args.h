// What a host and a model tell each other about the model's shape and the rank's place. Names are xLLM's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xllm/metadata/property.h"

namespace xllm {

// Facts of a loaded model. An absent optional means that the model's config does not say.
struct ModelArgs {
  REFLECT_PROPERTIES();

  PROPERTY(std::string, model_type);
  PROPERTY(std::string, dtype);
  PROPERTY(int64_t, hidden_size) = 0;
  PROPERTY(int64_t, intermediate_size) = 0;
  PROPERTY(int64_t, n_layers) = 0;
  PROPERTY(int64_t, n_heads) = 0;
  PROPERTY(std::optional<int64_t>, n_kv_heads);
  PROPERTY(int64_t, head_dim) = 0;
  PROPERTY(int64_t, vocab_size) = 0;
  PROPERTY(int64_t, max_position_embeddings) = 0;
  PROPERTY(double, rms_norm_eps) = 1e-6;
  PROPERTY(double, rope_theta) = 10000.0;
  PROPERTY(int64_t, sliding_window) = 0;  // keys that a query sees, itself included; 0: all
  PROPERTY(bool, tie_word_embeddings) = false;
  PROPERTY(std::optional<int32_t>, bos_token_id);
  PROPERTY(std::vector<int32_t>, eos_token_ids);
};

// The rank's place among the ranks of one model.
struct ParallelArgs {
  REFLECT_PROPERTIES();

  PROPERTY(int64_t, tp_rank) = 0;
  PROPERTY(int64_t, tp_size) = 1;
  PROPERTY(std::string, host) = "127.0.0.1";
  PROPERTY(int64_t, port) = 0;
};

}  // namespace xllm
