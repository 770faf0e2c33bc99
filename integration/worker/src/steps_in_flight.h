// Keeps the input tensors of asynchronous steps until the device has completed the steps, using one event per step.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <deque>
#include <optional>

#include "batch_builder.h"

namespace xllm_worker {

class StepsInFlight {
 public:
  explicit StepsInFlight(at::Device device) : device_(device) {}

  // Stores the inputs of the next step, and frees those of completed steps. The reference is valid until the next call.
  const Batch& hold(Batch batch);

  // Records the step's event on the current stream, after the step was enqueued. A failed step has no event; its inputs
  // are freed together with those of the next step.
  void mark();

 private:
  struct Step {
    Batch batch;
    std::optional<c10::Event> passed;
  };

  at::Device device_;
  std::deque<Step> steps_;
};

}  // namespace xllm_worker
