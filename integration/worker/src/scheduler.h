// Decides what each step computes: continuous batching with chunked prefill, first come, first served.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "block_manager.h"
#include "sequence.h"

namespace xllm::worker {

struct SchedulerLimits {
  int64_t max_seqs;
  int64_t max_tokens;  // of one step; at least max_seqs
};

class Scheduler {
 public:
  Scheduler(SchedulerLimits limits, BlockManager& blocks) : limits_(limits), blocks_(blocks) {}

  void add(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }

  // The next step: first one token for each sequence that decodes, then prompts in order of arrival while tokens, sequences
  // and pages last. Every sequence in it has pages for its new tokens. Not empty while there is work, provided that each
  // sequence alone fits into the cache.
  std::vector<ScheduledSequence> schedule();

  // The step has computed its part of the sequence, whose full pages others may use from now on: their steps come later
  // on the same stream, on every rank.
  void computed(const ScheduledSequence& part);

  // Takes a running sequence out and frees its pages. Those of one that failed can be bad, and are not kept for others.
  void remove(const Sequence& sequence, bool has_failed);

  // Running and waiting ones, in order of arrival.
  std::vector<const Sequence*> all() const;

  bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_preemptions() const { return num_preemptions_; }

 private:
  // Frees pages until `sequence` can hold one more token, taking them from the youngest. False when the youngest is itself.
  bool make_room_to_decode(Sequence& sequence);
  void preempt_youngest();
  void schedule_decodes(std::vector<ScheduledSequence>& step);
  void schedule_prompts(std::vector<ScheduledSequence>& step, int64_t budget);

  SchedulerLimits limits_;
  BlockManager& blocks_;
  // Both in order of arrival, and everything in running_ came before everything in waiting_.
  std::vector<std::unique_ptr<Sequence>> running_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  int64_t num_preemptions_ = 0;
};

}  // namespace xllm::worker
