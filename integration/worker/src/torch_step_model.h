// A step of any model that takes tensors: builds the batch, executes it, samples.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "batch_builder.h"
#include "step_model.h"

namespace xllm::worker {

class TorchStepModel : public StepModel {
 public:
  using Execute = std::function<at::Tensor(const Batch& batch)>;  // -> logits [n, vocabulary]
  using Stats = std::function<std::string()>;                     // -> a JSON object

  TorchStepModel(Execute execute, Stats stats, int64_t block_size, at::Device device);

  std::vector<int32_t> step(std::span<const ScheduledSequence> batch) override;
  std::string stats_json() override { return stats_(); }

 private:
  Execute execute_;
  Stats stats_;
  int64_t block_size_;
  at::Device device_;
};

}  // namespace xllm::worker
