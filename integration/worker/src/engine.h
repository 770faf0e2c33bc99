// The engine loop: handles input lines, schedules and runs steps, and writes events. Uses no tensors and no Python.
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

namespace xllm_worker {

struct EngineLimits {
  SchedulerLimits scheduler;
  int64_t max_model_len;
  std::vector<int32_t> eos_token_ids;
};

// Steps of one kind.
struct StepTimes {
  int64_t count = 0;
  Clock::duration total{};  // of the model: building the batch, computing and sampling
};

class Engine {
 public:
  using Write = std::function<void(std::string_view events)>;  // whole lines
  using Log = std::function<void(const std::string& message)>;

  Engine(StepModel& model, BlockManager& blocks, EngineLimits limits, Write write, Log log);

  // Runs until the inbox is closed and all requests are finished. Closes the inbox at its own end. On a RankFailure it
  // writes an error event for each unfinished request, those in the inbox included, and rethrows.
  void run(Inbox& inbox);

  // Makes `run` end after the current step, with an error event for each unfinished request, those in the inbox
  // included. Callable from any thread; never blocks. The caller must then wake the inbox.
  void stop(std::string message);

  // For a step that does not end: returns those error events, which the caller writes before it ends the process.
  // Callable from any thread. Returns an empty string when the engine's thread is still writing after `limit`. Keeps
  // the engine locked: it writes no more events, and must not be destroyed.
  std::string abandon(const std::string& message, Inbox& inbox, std::chrono::milliseconds limit);

  void handle(InputLine line);
  void step();
  bool has_work() const { return scheduler_.has_work(); }

 private:
  void serve(Inbox& inbox);
  void handle_lines();
  void accept(Request request);
  void cancel(const CancelCommand& command, int64_t line);
  void update_queue();
  StepTimes& times_of(const std::vector<ScheduledSequence>& batch);
  std::vector<NextToken> compute(const std::vector<ScheduledSequence>& batch, StepTimes& times);
  void deliver(Sequence& sequence, const NextToken& token);
  void fail_not_numbers(const std::vector<const Sequence*>& sequences);
  void fail_everything(const std::string& message, Inbox& inbox);
  std::string last_events(const std::string& message, Inbox& inbox);
  void fail(const Sequence& sequence, const std::string& message);
  void retire(const Sequence& sequence, bool has_failed);
  std::string_view finish_reason(const Sequence& sequence) const;  // empty: not finished
  std::string stats(const std::string& executor) const;

  StepModel& model_;
  BlockManager& blocks_;
  EngineLimits limits_;
  Scheduler scheduler_;
  Write write_;
  Log log_;
  std::unordered_set<std::string> active_ids_;
  Inbox* inbox_ = nullptr;  // set by `run`
  bool is_paused_ = false;
  bool is_over_ = false;  // every request has got its error event
  // Guards the requests and the output. Not held while the model computes, so that `abandon` can take it.
  std::timed_mutex mutex_;
  std::deque<InputLine> lines_;  // taken from the inbox, not handled yet
  std::string events_;  // of the current step or line, written in one call

  std::mutex stop_mutex_;
  std::string stop_message_;  // constant once the engine is stopping
  std::atomic<bool> is_stopping_{false};

  StepTimes prefill_steps_;  // prompts only
  StepTimes mixed_steps_;    // prompts and decodes
  StepTimes decode_steps_;   // decodes only
  int64_t num_failed_steps_ = 0;
  int64_t num_computed_tokens_ = 0;
  int64_t num_generated_tokens_ = 0;
  int64_t num_finished_ = 0;
  int64_t num_cancelled_ = 0;
  int64_t num_duplicates_ = 0;  // requests refused because their id is in use
};

}  // namespace xllm_worker
