// A fake model without tensors. Its next token is a hash of every cached token, so a wrong page, chunk or recomputation
// changes the answer.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "step_model.h"

namespace xllm_worker::probe {

class RecallModel : public StepModel {
 public:
  using OnStep = std::function<void(std::span<const ScheduledSequence>)>;

  // A step that computes the token `fail_on` throws; a sequence that ends with `nan_on` has NaN for logits.
  RecallModel(int64_t num_slots, int64_t block_size, int64_t vocab_size, int32_t fail_on, int32_t nan_on, OnStep on_step)
      : cache_(static_cast<size_t>(num_slots), -7),
        block_size_(block_size),
        vocab_size_(vocab_size),
        fail_on_(fail_on),
        nan_on_(nan_on),
        on_step_(std::move(on_step)) {}

  std::vector<NextToken> step(std::span<const ScheduledSequence> batch) override {
    on_step_(batch);
    std::vector<NextToken> next;
    for (const ScheduledSequence& part : batch) {
      const Sequence& sequence = *part.sequence;
      for (int64_t i = sequence.num_cached; i < sequence.num_cached + part.num_new; ++i) {
        const int32_t token = sequence.tokens.at(static_cast<size_t>(i));
        if (token == fail_on_) throw std::runtime_error("token " + std::to_string(token) + " cannot be computed");
        slot(sequence, i) = token;
      }
    }
    for (const ScheduledSequence& part : batch) {
      if (part.needs_token()) next.push_back({recall(*part.sequence)});
    }
    return next;
  }

  std::string stats_json() override { return "{}"; }
  void shutdown() override {}

 private:
  int32_t& slot(const Sequence& sequence, int64_t position) {
    const int64_t block = sequence.blocks.at(static_cast<size_t>(position / block_size_));
    return cache_.at(static_cast<size_t>(block * block_size_ + position % block_size_));
  }

  // FNV-1a over the tokens found in the cache.
  int32_t recall(const Sequence& sequence) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < sequence.num_tokens(); ++i) {
      hash = (hash ^ static_cast<uint64_t>(static_cast<int64_t>(slot(sequence, i)))) * 1099511628211u;
    }
    if (sequence.tokens.back() == nan_on_) return kNotANumber;
    return static_cast<int32_t>((hash >> 32) % static_cast<uint64_t>(vocab_size_));
  }

  std::vector<int32_t> cache_;
  int64_t block_size_;
  int64_t vocab_size_;
  int32_t fail_on_;
  int32_t nan_on_;
  OnStep on_step_;
};

}  // namespace xllm_worker::probe
