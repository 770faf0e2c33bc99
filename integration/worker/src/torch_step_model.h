// A step of any model that takes tensors: builds the batch, executes it, samples.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "batch_builder.h"
#include "step_model.h"
#include "steps_in_flight.h"

namespace xllm::worker {

// The model itself, whatever language it is written in.
class TensorModel {
 public:
  virtual ~TensorModel() = default;

  virtual at::Tensor execute(const Batch& batch) = 0;  // -> logits [n, vocabulary], one row per logits index
  virtual std::string stats_json() = 0;
  // What its collectives moved so far: {"all_reduce": [calls, bytes], ...}, bytes of this rank's inputs.
  virtual std::string traffic_json() { return "{}"; }
  virtual void shutdown() = 0;
};

// A step from its description to its logits. Every rank of a model runs this on equal descriptions.
class StepExecutor {
 public:
  StepExecutor(std::unique_ptr<TensorModel> model, int64_t block_size, at::Device device)
      : model_(std::move(model)), block_size_(block_size), device_(device), in_flight_(device) {}

  // Throws std::exception with a message for people.
  at::Tensor execute(std::span<const BatchEntry> entries);

  TensorModel& model() { return *model_; }

 private:
  std::unique_ptr<TensorModel> model_;
  int64_t block_size_;
  at::Device device_;
  StepsInFlight in_flight_;
};

// Lets the other ranks of a model compute the same steps.
class StepRelay {
 public:
  virtual ~StepRelay() = default;

  virtual void begin(std::span<const BatchEntry> entries) = 0;
  virtual void end() = 0;
  // The step failed here. Throws RankFailure unless the ranks can go on.
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

}  // namespace xllm::worker
