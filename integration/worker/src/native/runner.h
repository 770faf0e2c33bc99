// Runs the steps of a native model, either unpadded or padded to the bucket sizes of the Python model's graphs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "native/model.h"
#include "torch_step_model.h"

namespace xllm_worker::native {

struct RunnerLimits {
  int64_t max_num_seqs;    // of one step
  int64_t max_num_tokens;  // of one step
  int64_t max_model_len;
  bool pad_to_graph_sizes;  // pad as the Python graph runners do, for byte-exact comparison
};

// Bucket sizes as in xllm_graph: 1, 2, 4, 8, then multiples of 16, up to the first that is >= the limit.
std::vector<int64_t> sequence_buckets(int64_t max_num_seqs);
// 1, 2, 4, ..., 256, then multiples of 256 up to 2,048, then multiples of 1,024, up to the first that is >= the limit.
std::vector<int64_t> token_buckets(int64_t max_num_tokens);

class Runner : public TensorModel {
 public:
  Runner(CausalLM model, std::vector<KvCache> caches, const RunnerLimits& limits);

  at::Tensor execute(const Batch& batch) override;
  std::string stats_json() override;
  std::string traffic_json() override;
  void shutdown() override { model_.collectives().release(); }

 private:
  at::Tensor run_eagerly(const Batch& batch);
  at::Tensor run_decode_bucket(const Batch& batch, int64_t bucket);
  at::Tensor run_token_bucket(const Batch& batch, int64_t bucket);
  AttentionStep plan_ragged_step(const Batch& batch);

  CausalLM model_;
  std::vector<KvCache> caches_;
  int64_t page_size_;
  int64_t max_model_len_;
  std::vector<int64_t> sequence_buckets_, token_buckets_;  // empty: no padding
  int64_t num_eager_ = 0, num_decode_ = 0, num_piecewise_ = 0;
};

}  // namespace xllm_worker::native
