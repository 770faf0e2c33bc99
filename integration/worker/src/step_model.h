// What the engine needs of a model: one step in, one token out for each sequence that wants one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sequence.h"

namespace xllm::worker {

class StepModel {
 public:
  // In place of a token where the logits hold NaN.
  static constexpr int32_t kNotANumber = -1;

  virtual ~StepModel() = default;

  // Computes the step and returns the next token of each entry with needs_token(), in order. Throws std::exception when the
  // step failed; the model must be usable for the next one.
  virtual std::vector<int32_t> step(std::span<const ScheduledSequence> batch) = 0;

  // A JSON object of counters.
  virtual std::string stats_json() = 0;

  // Frees what the model holds, in the order that it needs. No step after it.
  virtual void shutdown() = 0;
};

}  // namespace xllm::worker
