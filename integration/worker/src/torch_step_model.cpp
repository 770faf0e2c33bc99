#include "torch_step_model.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

#include "sampler.h"

namespace xllm::worker {

namespace {

BatchEntry to_entry(const ScheduledSequence& scheduled) {
  const Sequence& sequence = *scheduled.sequence;
  const auto begin = static_cast<size_t>(sequence.num_cached);
  return {
      .new_tokens = std::span(sequence.tokens).subspan(begin, static_cast<size_t>(scheduled.num_new)),
      .num_cached = sequence.num_cached,
      .blocks = sequence.blocks,
      .wants_logits = scheduled.needs_token(),
  };
}

}  // namespace

TorchStepModel::TorchStepModel(std::unique_ptr<TensorModel> model, int64_t block_size, at::Device device)
    : model_(std::move(model)), block_size_(block_size), device_(device) {}

std::vector<int32_t> TorchStepModel::step(std::span<const ScheduledSequence> scheduled) {
  std::vector<BatchEntry> entries;
  entries.reserve(scheduled.size());
  for (const ScheduledSequence& part : scheduled) entries.push_back(to_entry(part));
  try {
    const Batch batch = build_batch(entries, block_size_, device_);
    return sample_greedy(model_->execute(batch));
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

}  // namespace xllm::worker
