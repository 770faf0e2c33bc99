#include "native/model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>
#include <tuple>

#include "native/ops.h"

namespace xllm_worker::native {

namespace {

using xllm_executor::NativeState;

const at::Tensor& tensor(const NativeState& state, const std::string& name) {
  const auto found = state.tensors.find(name);
  if (found == state.tensors.end()) throw std::runtime_error("the loaded model has no tensor " + name);
  return found->second;
}

at::Tensor optional_tensor(const NativeState& state, const std::string& name) {
  const auto found = state.tensors.find(name);
  return found == state.tensors.end() ? at::Tensor() : found->second;
}

auto key(const AttentionLayer& layer) {
  return std::tuple(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.sliding_window);
}

}  // namespace

void check_served(const NativeState& state) {
  static const std::set<std::string> kServed = {"llama", "LlamaForCausalLM", "qwen3", "Qwen3ForCausalLM"};
  const auto& architectures = state.args.architectures();
  const std::string& name =
      architectures && !architectures->empty() ? architectures->front() : state.args.model_type();
  if (!kServed.contains(name)) {
    throw std::runtime_error("--model_impl=native supports Llama and Qwen3; the checkpoint is " + name +
                             ". Use --model_impl=python for other families");
  }
  const std::string& act = state.args.hidden_act();
  if (act != "silu" && act != "swish") {
    throw std::runtime_error("--model_impl=native supports hidden_act silu; the checkpoint has " + act);
  }
}

CausalLM::CausalLM(NativeState state, Collectives collectives)
    : collectives_(std::move(collectives)),
      dtype_(state.dtype),
      rms_norm_eps_(state.args.rms_norm_eps()),
      vocab_size_(state.args.vocab_size()) {
  embedding_ = tensor(state, "model.embed_tokens.weight");
  rotary_table_ = tensor(state, "model.layers.0.self_attn.rotary_emb.cos_sin");
  final_norm_ = tensor(state, "model.norm.weight");
  head_ = tensor(state, "lm_head.weight");
  for (size_t i = 0; i < state.layers.size(); ++i) layers_.push_back(make_layer(state, i));
}

CausalLM::Layer CausalLM::make_layer(const NativeState& state, size_t layer_id) {
  const std::string prefix = "model.layers." + std::to_string(layer_id) + ".";
  const auto weight = [&](const char* name) { return tensor(state, prefix + name + ".weight"); };
  const auto optional = [&](const std::string& name) { return optional_tensor(state, prefix + name); };
  Layer layer;
  layer.attention = state.layers[layer_id];
  layer.input_norm = weight("input_layernorm");
  layer.post_attention_norm = weight("post_attention_layernorm");
  layer.qkv = weight("self_attn.qkv_proj");
  layer.qkv_bias = optional("self_attn.qkv_proj.bias");
  layer.o = weight("self_attn.o_proj");
  layer.o_bias = optional("self_attn.o_proj.bias");
  layer.q_norm = optional("self_attn.q_norm.weight");
  layer.k_norm = optional("self_attn.k_norm.weight");
  layer.gate_up = weight("mlp.gate_up_proj");
  layer.gate_up_bias = optional("mlp.gate_up_proj.bias");
  layer.down = weight("mlp.down_proj");
  layer.down_bias = optional("mlp.down_proj.bias");
  const auto group = std::find_if(
      groups_.begin(), groups_.end(), [&](const auto& other) { return key(other) == key(layer.attention); });
  layer.group = static_cast<size_t>(group - groups_.begin());
  if (group == groups_.end()) groups_.push_back(layer.attention);
  return layer;
}

at::Tensor CausalLM::embed(const at::Tensor& tokens) {
  if (collectives_.size() == 1 && tokens.is_cpu()) return at::embedding(embedding_, tokens);
  // The vocabulary is padded to a multiple of the ranks and sharded. A token of another rank's shard contributes zero.
  // A token outside the vocabulary contributes NaN, so that its logits are NaN.
  const int64_t shard_size = embedding_.size(0);
  const int64_t start = std::min(collectives_.rank() * shard_size, vocab_size_);
  const int64_t count = std::min(shard_size, vocab_size_ - start);
  const at::Tensor local = tokens - start;
  const at::Tensor outside = (tokens < 0).logical_or(tokens >= vocab_size_);
  const at::Tensor absent = (local < 0).logical_or(local >= count).logical_or(outside);
  const at::Tensor rows = at::embedding(embedding_, local.masked_fill(absent, 0));
  at::Tensor sum = rows.masked_fill(absent.unsqueeze(-1), 0);
  sum.masked_fill_(outside.unsqueeze(-1), std::numeric_limits<double>::quiet_NaN());
  collectives_.all_reduce(sum);
  return sum;
}

at::Tensor CausalLM::sum_over_ranks(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (collectives_.size() == 1) return project(x, weight, bias);
  at::Tensor out = project(x, weight, collectives_.rank() == 0 ? bias : at::Tensor());
  collectives_.all_reduce(out);
  return out;
}

at::Tensor CausalLM::attend(const Layer& layer,
                            const at::Tensor& hidden,
                            const Rotation& rotation,
                            const AttentionStep& attention,
                            const KvCache& cache) const {
  const AttentionLayer& shape = layer.attention;
  const at::Tensor qkv = project(hidden, layer.qkv, layer.qkv_bias)
                             .view({-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim});
  at::Tensor q = qkv.narrow(1, 0, shape.num_heads);
  at::Tensor k = qkv.narrow(1, shape.num_heads, shape.num_kv_heads);
  const at::Tensor v = qkv.narrow(1, shape.num_heads + shape.num_kv_heads, shape.num_kv_heads);
  if (layer.q_norm.defined()) {
    q = rms_norm(q, layer.q_norm, rms_norm_eps_);
    k = rms_norm(k, layer.k_norm, rms_norm_eps_);
  }
  q = rotate(q, rotation.cos, rotation.sin);
  k = rotate(k, rotation.cos, rotation.sin);
  at::Tensor out = q.new_empty(q.sizes());
  append(attention.slots, k, v, cache);
  attention.plans[layer.group]->run(q, cache, out);
  return out.flatten(1);
}

at::Tensor CausalLM::forward(const at::Tensor& tokens,
                             const at::Tensor& positions,
                             const AttentionStep& attention,
                             const std::vector<KvCache>& caches) {
  Rotation rotation;
  std::tie(rotation.cos, rotation.sin) = rotary_angles(rotary_table_, positions, dtype_);
  at::Tensor hidden = embed(tokens);
  at::Tensor residual;
  const auto add_and_norm = [&](const at::Tensor& weight) {
    if (residual.defined()) {
      std::tie(hidden, residual) = fused_add_rms_norm(hidden, residual, weight, rms_norm_eps_);
    } else {
      residual = hidden;
      hidden = rms_norm(hidden, weight, rms_norm_eps_);
    }
  };
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    add_and_norm(layer.input_norm);
    hidden = sum_over_ranks(attend(layer, hidden, rotation, attention, caches[i]), layer.o, layer.o_bias);
    add_and_norm(layer.post_attention_norm);
    const at::Tensor inner = silu_and_mul(project(hidden, layer.gate_up, layer.gate_up_bias));
    hidden = sum_over_ranks(inner, layer.down, layer.down_bias);
  }
  add_and_norm(final_norm_);
  return hidden;
}

at::Tensor CausalLM::compute_logits(const at::Tensor& hidden, const std::optional<at::Tensor>& logits_indices) {
  const at::Tensor rows = logits_indices ? hidden.index_select(0, *logits_indices) : hidden;
  const at::Tensor logits = project(rows, head_);
  const int64_t size = collectives_.size();
  if (size == 1) return logits;
  const at::Tensor shards = collectives_.all_gather(logits).view({size, logits.size(0), logits.size(1)});
  const at::Tensor joined = shards.transpose(0, 1).reshape({logits.size(0), size * logits.size(1)});
  return joined.narrow(1, 0, vocab_size_).contiguous();
}

}  // namespace xllm_worker::native
