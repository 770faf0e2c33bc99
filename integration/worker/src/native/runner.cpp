#include "native/runner.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "token_ids.h"

namespace xllm_worker::native {

namespace {

constexpr int64_t kTokenBudget = 8192;  // the largest padded step

struct Stride {
  int64_t step;
  int64_t last;  // up to here
};

std::vector<int64_t> up_to(int64_t limit, std::vector<int64_t> sizes, const std::vector<Stride>& strides) {
  for (const Stride& stride : strides) {
    while (sizes.back() < limit && sizes.back() < stride.last) {
      sizes.push_back((sizes.back() / stride.step + 1) * stride.step);
    }
  }
  const auto end = std::lower_bound(sizes.begin(), sizes.end(), limit);
  sizes.erase(end + 1, sizes.end());
  return sizes;
}

std::optional<int64_t> bucket_for(const std::vector<int64_t>& sizes, int64_t count) {
  const auto found = std::lower_bound(sizes.begin(), sizes.end(), count);
  return found == sizes.end() ? std::nullopt : std::optional(*found);
}

at::Tensor padded(const at::Tensor& x, int64_t size) {
  at::Tensor out = x.new_zeros({size});
  out.narrow(0, 0, x.numel()).copy_(x);
  return out;
}

bool is_decode(const Batch& batch) { return !batch.metadata.is_prefill() && !batch.metadata.is_chunked_prefill(); }

}  // namespace

std::vector<int64_t> sequence_buckets(int64_t max_num_seqs) {
  return up_to(max_num_seqs, {1, 2, 4, 8}, {{16, INT64_MAX}});
}

std::vector<int64_t> token_buckets(int64_t max_num_tokens) {
  return up_to(max_num_tokens, {1, 2, 4, 8, 16, 32, 64, 128, 256}, {{256, 2048}, {1024, INT64_MAX}});
}

Runner::Runner(CausalLM model, std::vector<KvCache> caches, const RunnerLimits& limits)
    : model_(std::move(model)),
      caches_(std::move(caches)),
      page_size_(caches_.at(0).k.size(1)),
      max_model_len_(limits.max_model_len) {
  if (!limits.pad_to_graph_sizes) return;
  sequence_buckets_ = sequence_buckets(limits.max_num_seqs);
  token_buckets_ = token_buckets(
      std::min({limits.max_num_tokens, limits.max_num_seqs * limits.max_model_len, kTokenBudget}));
}

at::Tensor Runner::execute(const Batch& batch) {
  const c10::NoGradGuard no_grad;
  const int64_t num_tokens = batch.tokens.numel();
  if (batch.tokens.is_cpu()) check_token_ids(batch.tokens, model_.vocab_size());
  if (is_decode(batch)) {
    if (const auto bucket = bucket_for(sequence_buckets_, num_tokens)) return run_decode_bucket(batch, *bucket);
  }
  if (const auto bucket = bucket_for(token_buckets_, num_tokens)) return run_token_bucket(batch, *bucket);
  return run_eagerly(batch);
}

at::Tensor Runner::run_eagerly(const Batch& batch) {
  ++num_eager_;
  const AttentionStep attention = plan_ragged_step(batch);
  const at::Tensor hidden = model_.forward(batch.tokens, batch.positions, attention, caches_);
  return model_.compute_logits(hidden, batch.logits_indices);
}

// As a full decode graph: the LM head runs on all rows, and the rows of logits_indices are selected afterwards.
at::Tensor Runner::run_decode_bucket(const Batch& batch, int64_t bucket) {
  ++num_decode_;
  AttentionStep attention{batch.metadata.slot_mapping().to(at::kLong), {}};
  for (const AttentionLayer& group : model_.groups()) {
    attention.plans.push_back(plan_dense_decode(batch.metadata, group, page_size_, bucket, max_model_len_));
  }
  const at::Tensor hidden =
      model_.forward(padded(batch.tokens, bucket), padded(batch.positions, bucket), attention, caches_);
  return model_.compute_logits(hidden, std::nullopt).index_select(0, batch.logits_indices);
}

// As a piecewise graph: only tokens and positions are padded, attention is not.
at::Tensor Runner::run_token_bucket(const Batch& batch, int64_t bucket) {
  ++num_piecewise_;
  const AttentionStep attention = plan_ragged_step(batch);
  const at::Tensor hidden =
      model_.forward(padded(batch.tokens, bucket), padded(batch.positions, bucket), attention, caches_);
  return model_.compute_logits(hidden, batch.logits_indices);
}

AttentionStep Runner::plan_ragged_step(const Batch& batch) {
  AttentionStep attention{batch.metadata.slot_mapping().to(at::kLong), {}};
  for (const AttentionLayer& group : model_.groups()) {
    attention.plans.push_back(plan_ragged(batch.metadata, group, page_size_, model_.dtype()));
  }
  return attention;
}

std::string Runner::stats_json() {
  const int64_t num_steps = num_eager_ + num_decode_ + num_piecewise_;
  nlohmann::json steps = nlohmann::json::object();
  if (num_eager_ > 0) steps["eager"] = num_eager_;
  if (num_decode_ > 0) steps["decode_graph"] = num_decode_;
  if (num_piecewise_ > 0) steps["piecewise"] = num_piecewise_;
  return nlohmann::json{{"steps", steps}, {"plans", std::vector<int64_t>(model_.groups().size(), num_steps)}}.dump();
}

std::string Runner::traffic_json() {
  const auto pair = [](const Traffic& traffic) { return nlohmann::json{traffic.num_calls, traffic.num_bytes}; };
  const Collectives& collectives = model_.collectives();
  return nlohmann::json{{"all_reduce", pair(collectives.all_reduced())},
                        {"all_gather", pair(collectives.all_gathered())}}
      .dump();
}

}  // namespace xllm_worker::native
