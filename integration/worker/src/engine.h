// The worker's loop: takes lines in, runs one step after the other, gives events out. It knows no tensors and no Python.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "block_manager.h"
#include "inbox.h"
#include "protocol.h"
#include "scheduler.h"
#include "step_model.h"

namespace xllm::worker {

struct EngineLimits {
  SchedulerLimits scheduler;
  int64_t max_model_len;
  std::vector<int32_t> eos_token_ids;
};

class Engine {
 public:
  using Write = std::function<void(std::string_view events)>;  // whole lines
  using Log = std::function<void(const std::string& message)>;

  Engine(StepModel& model, BlockManager& blocks, EngineLimits limits, Write write, Log log);

  // Until the inbox is at its end and everything in flight is finished. Throws RankFailure, after an error event for
  // each request in flight or still in the inbox, when the model can serve no more.
  void run(Inbox& inbox);

  // From any thread, and at once whatever the engine does: `run` ends after the step that it is in, with an error event
  // for every request in flight or still in the inbox. Wake the inbox afterwards.
  void stop(std::string message);

  // From any thread, for a step that does not end: those error events, for the caller to write before it ends the process.
  // Empty when the engine's thread does not come out of its own writing within `limit`. The engine gives no event after
  // them, and cannot be destroyed.
  std::string abandon(const std::string& message, Inbox& inbox, std::chrono::milliseconds limit);

  void handle(InputLine line);
  void step();
  bool has_work() const { return scheduler_.has_work(); }

 private:
  void serve(Inbox& inbox);
  void handle_lines();
  void accept(Request request);
  std::vector<NextToken> compute(const std::vector<ScheduledSequence>& batch);
  void deliver(Sequence& sequence, const NextToken& token);
  void fail_everything(const std::string& message, Inbox& inbox);
  std::string last_events(const std::string& message, Inbox& inbox);
  void fail(const Sequence& sequence, const std::string& message);
  void retire(const Sequence& sequence, bool has_failed);
  std::string_view finish_reason(const Sequence& sequence) const;  // empty: it goes on
  std::string stats(const std::string& executor) const;

  StepModel& model_;
  BlockManager& blocks_;
  EngineLimits limits_;
  Scheduler scheduler_;
  Write write_;
  Log log_;
  std::unordered_set<std::string> live_ids_;
  bool is_paused_ = false;
  bool is_over_ = false;  // every request has its error event
  // Guards what `abandon` reads, and the output, except while the model computes.
  std::timed_mutex mutex_;
  std::deque<InputLine> lines_;  // out of the inbox and not handled yet
  std::string events_;  // of the current step or line, written together

  std::mutex stop_mutex_;
  std::string stop_message_;  // constant once the engine is stopping
  std::atomic<bool> is_stopping_{false};

  int64_t num_steps_ = 0;
  int64_t num_failed_steps_ = 0;
  int64_t num_computed_tokens_ = 0;
  int64_t num_generated_tokens_ = 0;
  int64_t num_finished_ = 0;
};

}  // namespace xllm::worker
