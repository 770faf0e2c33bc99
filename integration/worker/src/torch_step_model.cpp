#include "torch_step_model.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

#include "sampler.h"

namespace xllm_worker {

namespace {

BatchEntry to_entry(const ScheduledSequence& scheduled) {
  const Sequence& sequence = *scheduled.sequence;
  const auto begin = static_cast<size_t>(sequence.num_cached);
  return {
      .new_tokens = std::span(sequence.tokens).subspan(begin, static_cast<size_t>(scheduled.num_new)),
      .num_cached = sequence.num_cached,
      .blocks = sequence.blocks,
      .wants_logits = scheduled.needs_token(),
      .group_blocks = {sequence.group_blocks.begin(), sequence.group_blocks.end()},
      .state_slot = sequence.state_slot,
  };
}

std::vector<NextToken> sample(const at::Tensor& logits, std::span<const ScheduledSequence> batch) {
  const std::vector<int32_t> ids = sample_greedy(logits);
  std::vector<NextToken> tokens;
  tokens.reserve(ids.size());
  for (const ScheduledSequence& part : batch) {
    if (!part.needs_token()) continue;
    const size_t row = tokens.size();
    tokens.push_back({ids.at(row)});
    if (part.sequence->request.show_logits && tokens.back().id != StepModel::kNotANumber) {
      tokens.back().logits = summarize(logits[static_cast<int64_t>(row)]);
    }
  }
  return tokens;
}

}  // namespace

at::Tensor StepExecutor::execute(std::span<const BatchEntry> entries) {
  try {
    at::Tensor logits = model_->execute(in_flight_.hold(build_batch(entries, block_size_, device_, has_states_, num_groups_)));
    in_flight_.mark();
    return logits;
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

std::vector<NextToken> TorchStepModel::step(std::span<const ScheduledSequence> batch) {
  std::vector<BatchEntry> entries;
  entries.reserve(batch.size());
  for (const ScheduledSequence& part : batch) entries.push_back(to_entry(part));
  if (relay_ == nullptr) return compute(batch, entries);
  relay_->begin(entries);
  try {
    std::vector<NextToken> tokens = compute(batch, entries);
    relay_->end();
    return tokens;
  } catch (const std::exception& error) {
    relay_->fail(error.what());
    throw;
  }
}

std::vector<NextToken> TorchStepModel::compute(std::span<const ScheduledSequence> batch,
                                               std::span<const BatchEntry> entries) {
  const at::Tensor logits = executor_.execute(entries);
  try {
    return sample(logits, batch);
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

}  // namespace xllm_worker
