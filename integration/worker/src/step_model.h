// StepModel, the engine's interface to a model: computes a step and samples the next tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sequence.h"

namespace xllm_worker {

// The ranks cannot continue: one of them has died, hangs or failed. The message names it.
class RankFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Summary of a row of logits, for requests with show_logits.
struct LogitsSummary {
  std::string digest;                           // hash of the row's bytes, for byte-exact comparison
  std::vector<std::pair<int32_t, float>> top;  // the largest logits, in descending order; ties by token id
};

struct NextToken {
  int32_t id = 0;
  std::optional<LogitsSummary> logits = std::nullopt;
};

class StepModel {
 public:
  // The token id for a row of logits with NaN.
  static constexpr int32_t kNotANumber = -1;

  virtual ~StepModel() = default;

  // Computes the step and returns the next token of each entry with needs_token(), in order. Throws std::exception when
  // the step failed. The next step must work, except after a RankFailure.
  virtual std::vector<NextToken> step(std::span<const ScheduledSequence> batch) = 0;

  // A JSON object of counters.
  virtual std::string stats_json() = 0;

  // Frees the model's resources in the right order. No step may follow.
  virtual void shutdown() = 0;
};

}  // namespace xllm_worker
