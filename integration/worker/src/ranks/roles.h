// The step loops of rank 0 (leader) and of the other ranks (followers). Also checks that all ranks have equal settings.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ranks/rendezvous.h"
#include "torch_step_model.h"

namespace xllm_worker {

// Compares the ranks' info on rank 0. Throws RankFailure on every rank when a rank differs from rank 0, or does not
// load the model within `limit` after rank 0.
void check_ranks_agree(RankGroup& ranks, const nlohmann::json& info, std::chrono::milliseconds limit);

// Rank 0: sends every step to the other ranks before it runs the step itself.
class LeaderModel : public StepModel, private StepRelay {
 public:
  // leave_group: destroys the process group. Called after shutdown of the executor, whose graphs hold collectives.
  LeaderModel(StepExecutor executor, RankGroup& ranks, std::function<void()> leave_group);
  ~LeaderModel() override;

  std::vector<NextToken> step(std::span<const ScheduledSequence> batch) override { return model_.step(batch); }
  // The executor's stats, plus "tensor_parallel": the traffic since the warm-up, and the other ranks' stats.
  std::string stats_json() override;
  void shutdown() override;

 private:
  void begin(std::span<const BatchEntry> entries) override;
  void end() override { ranks_.link().end_step(); }
  void fail(const std::string& message) override;

  TorchStepModel model_;
  RankGroup& ranks_;
  std::function<void()> leave_group_;
  std::unique_ptr<nlohmann::json> traffic_before_;  // after the warm-up
  int64_t num_steps_ = 0, num_tokens_ = 0, num_logits_ = 0;
};

// The other ranks: runs the steps that rank 0 sends, until it sends kEnd. Throws RankFailure.
void follow(RankGroup& ranks, StepExecutor executor, const std::function<void()>& leave_group);

}  // namespace xllm_worker
