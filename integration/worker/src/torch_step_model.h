// Runs a step of a model with tensor inputs: builds the batch, executes it, samples the tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "batch_builder.h"
#include "step_model.h"
#include "steps_in_flight.h"

namespace xllm_worker {

// A model with tensor inputs, in Python or C++.
class TensorModel {
 public:
  virtual ~TensorModel() = default;

  virtual at::Tensor execute(const Batch& batch) = 0;  // -> logits [n, vocabulary], one row per logits index
  virtual std::string stats_json() = 0;
  // Traffic of the collectives so far: {"all_reduce": [calls, bytes of this rank's inputs], ...}.
  virtual std::string traffic_json() { return "{}"; }
  virtual void shutdown() = 0;
};

// Computes the logits of a step from its batch entries. All ranks run this with equal entries.
class StepExecutor {
 public:
  // `has_states`: the model's layers keep a state per sequence.
  // `num_groups`: KV cache groups from 1 on.
  StepExecutor(std::unique_ptr<TensorModel> model, int64_t block_size, bool has_states, int64_t num_groups,
               at::Device device)
      : model_(std::move(model)),
        block_size_(block_size),
        has_states_(has_states),
        num_groups_(num_groups),
        device_(device),
        in_flight_(device) {}

  // Throws std::exception with a readable message.
  at::Tensor execute(std::span<const BatchEntry> entries);

  TensorModel& model() { return *model_; }

 private:
  std::unique_ptr<TensorModel> model_;
  int64_t block_size_;
  bool has_states_;
  int64_t num_groups_;
  at::Device device_;
  StepsInFlight in_flight_;
};

// Forwards steps to the other ranks of a model.
class StepRelay {
 public:
  virtual ~StepRelay() = default;

  virtual void begin(std::span<const BatchEntry> entries) = 0;
  virtual void end() = 0;
  // Call after the step failed on this rank. Throws RankFailure unless all ranks can continue.
  virtual void fail(const std::string& message) = 0;
};

class TorchStepModel : public StepModel {
 public:
  explicit TorchStepModel(StepExecutor executor, StepRelay* relay = nullptr)
      : executor_(std::move(executor)), relay_(relay) {}

  std::vector<NextToken> step(std::span<const ScheduledSequence> batch) override;
  std::string stats_json() override { return executor_.model().stats_json(); }
  void shutdown() override { executor_.model().shutdown(); }

  StepExecutor& executor() { return executor_; }

 private:
  std::vector<NextToken> compute(std::span<const ScheduledSequence> batch, std::span<const BatchEntry> entries);

  StepExecutor executor_;
  StepRelay* relay_;
};

}  // namespace xllm_worker
