// A step of any model that takes tensors: builds the batch, executes it, samples.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "batch_builder.h"
#include "step_model.h"

namespace xllm::worker {

// The model itself, whatever language it is written in.
class TensorModel {
 public:
  virtual ~TensorModel() = default;

  virtual at::Tensor execute(const Batch& batch) = 0;  // -> logits [n, vocabulary], one row per logits index
  virtual std::string stats_json() = 0;
  virtual void shutdown() = 0;
};

class TorchStepModel : public StepModel {
 public:
  TorchStepModel(std::unique_ptr<TensorModel> model, int64_t block_size, at::Device device);

  std::vector<int32_t> step(std::span<const ScheduledSequence> batch) override;
  std::string stats_json() override { return model_->stats_json(); }
  void shutdown() override { model_->shutdown(); }

 private:
  std::unique_ptr<TensorModel> model_;
  int64_t block_size_;
  at::Device device_;
};

}  // namespace xllm::worker
