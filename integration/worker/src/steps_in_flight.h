// Keeps what steps read until the device has passed them, however their inputs reach it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <deque>
#include <optional>

#include "batch_builder.h"

namespace xllm::worker {

class StepsInFlight {
 public:
  explicit StepsInFlight(at::Device device) : device_(device) {}

  // Takes the inputs of the next step, and drops those of steps that the device has passed. The reference is valid
  // until the next call.
  const Batch& hold(Batch batch);

  // The step is enqueued on the current stream. One that failed has no mark: it goes with the next one.
  void mark();

 private:
  struct Step {
    Batch batch;
    std::optional<c10::Event> passed;
  };

  at::Device device_;
  std::deque<Step> steps_;
};

}  // namespace xllm::worker
