// What rank 0 and the others do: agree, run equal steps, report, end together.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ranks/rendezvous.h"
#include "torch_step_model.h"

namespace xllm::worker {

// Compares the ranks' info on rank 0. Throws RankFailure on every rank when one differs from rank 0, with how, or has not
// loaded within `limit` of rank 0.
void agree(RankGroup& ranks, const nlohmann::json& info, std::chrono::milliseconds limit);

// Rank 0: every step goes to the other ranks before it runs here.
class LeaderModel : public StepModel, private StepRelay {
 public:
  // leave: ends the process group of the collectives, after the executor's graphs are gone.
  LeaderModel(StepExecutor executor, RankGroup& ranks, std::function<void()> leave);
  ~LeaderModel() override;

  std::vector<NextToken> step(std::span<const ScheduledSequence> batch) override { return model_.step(batch); }
  // The executor's, with "tensor_parallel": traffic so far, and the other ranks' own.
  std::string stats_json() override;
  void shutdown() override;

 private:
  void begin(std::span<const BatchEntry> entries) override;
  void end() override { ranks_.link().end_step(); }
  void fail(const std::string& message) override;

  TorchStepModel model_;
  RankGroup& ranks_;
  std::function<void()> leave_;
  std::unique_ptr<nlohmann::json> traffic_before_;  // of the warm-up
  int64_t num_steps_ = 0, num_tokens_ = 0, num_logits_ = 0;
};

// The other ranks: runs what rank 0 sends until it says that there is no more. Throws RankFailure.
void follow(RankGroup& ranks, StepExecutor executor, const std::function<void()>& leave);

}  // namespace xllm::worker
