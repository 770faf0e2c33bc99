#include "torch_step_model.h"

#include <utility>

#include "sampler.h"

namespace xllm::worker {

TorchStepModel::TorchStepModel(Execute execute, Stats stats, int64_t block_size, at::Device device)
    : execute_(std::move(execute)), stats_(std::move(stats)), block_size_(block_size), device_(device) {}

std::vector<int32_t> TorchStepModel::step(std::span<const ScheduledSequence> scheduled) {
  std::vector<BatchEntry> entries;
  entries.reserve(scheduled.size());
  for (const ScheduledSequence& part : scheduled) {
    const Sequence& sequence = *part.sequence;
    const std::span<const int32_t> tokens(sequence.tokens);
    entries.push_back({
        .new_tokens = tokens.subspan(static_cast<size_t>(sequence.num_cached), static_cast<size_t>(part.num_new)),
        .num_cached = sequence.num_cached,
        .blocks = sequence.blocks,
        .wants_logits = part.needs_token(),
    });
  }
  const Batch batch = build_batch(entries, block_size_, device_);
  return sample_greedy(execute_(batch));
}

}  // namespace xllm::worker
