// What the engine needs of a model: one step in, one token out for each sequence that wants one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sequence.h"

namespace xllm::worker {

// The model can serve no further step: its ranks have lost each other. The message names the rank that is to blame.
class RankFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What one row of logits was, for a request that asked.
struct LogitsSummary {
  std::string digest;                           // of the row's bytes: equal digests, equal logits
  std::vector<std::pair<int32_t, float>> top;  // the largest, in order; equal ones by token id
};

struct NextToken {
  int32_t id = 0;
  std::optional<LogitsSummary> logits = std::nullopt;
};

class StepModel {
 public:
  // In place of a token where the logits hold NaN.
  static constexpr int32_t kNotANumber = -1;

  virtual ~StepModel() = default;

  // Computes the step and returns the next token of each entry with needs_token(), in order. Throws std::exception when
  // the step failed; the model must be usable for the next one, unless it is a RankFailure.
  virtual std::vector<NextToken> step(std::span<const ScheduledSequence> batch) = 0;

  // A JSON object of counters.
  virtual std::string stats_json() = 0;

  // Frees what the model holds, in the order that it needs. No step after it.
  virtual void shutdown() = 0;
};

}  // namespace xllm::worker
