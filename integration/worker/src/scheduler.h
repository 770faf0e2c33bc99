// Schedules sequences into steps: continuous batching with chunked prefill. First come, first served, except that short
// prompts pass long ones.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "block_manager.h"
#include "sequence.h"

namespace xllm_worker {

struct SchedulerLimits {
  int64_t max_seqs;
  int64_t max_tokens;  // of one step; at least max_seqs
  int64_t max_mixed_prefill_tokens;  // prompt tokens of a step with decodes: bounds the time between their tokens
};

class Scheduler {
 public:
  Scheduler(SchedulerLimits limits, BlockManager& blocks);

  void add(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }

  // Returns the next step: one token for each decoding sequence, then prompts in order of arrival up to the limits of
  // tokens, sequences and pages. A prompt that is cut gets at least half of the remaining tokens; prompts of at most
  // half its length get the others. Allocates the pages for all new tokens. Not empty while has_work(), if each
  // sequence without the others fits into the cache.
  std::vector<ScheduledSequence> schedule();

  // Call after the step. Puts the new full pages into the prefix cache: later steps run on the same stream, so other
  // sequences can read them.
  void update_computed(const ScheduledSequence& part);

  // Takes the pages of these running sequences, which are wrong, out of the prefix cache. Preempts all other sequences
  // that read one of them: their tokens are computed again.
  void discard_pages_of(std::span<const Sequence* const> sequences);

  // Removes a running or waiting sequence and frees its pages. The prefix cache drops the pages of a failed sequence.
  void remove(const Sequence& sequence, bool has_failed);

  // The running or waiting sequence of this request; null if there is none.
  const Sequence* find(std::string_view request_id) const;

  // All running and waiting sequences, in order of arrival.
  std::vector<const Sequence*> all() const;

  bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_preemptions() const { return num_preemptions_; }
  // Sequences that have left the queue: they were scheduled at least once, or were removed before.
  int64_t num_dequeued() const { return num_dequeued_; }

 private:
  // Allocates a page for one more token if needed, and preempts the youngest sequences until one is free. Returns false
  // when `sequence` itself was preempted.
  bool make_room_to_decode(Sequence& sequence);
  void preempt_youngest();
  void preempt(size_t index);  // in running_
  void schedule_decodes(std::vector<ScheduledSequence>& step);
  bool admit(size_t index);  // in waiting_; returns false when too few pages are free
  void schedule_prompts(std::vector<ScheduledSequence>& step, int64_t budget);
  void free_state_slot(Sequence& sequence);

  SchedulerLimits limits_;
  BlockManager& blocks_;
  // Both in order of arrival.
  std::vector<std::unique_ptr<Sequence>> running_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<int32_t> free_state_slots_;  // a stack; one slot for each sequence that may run
  int64_t num_preemptions_ = 0;
  int64_t num_dequeued_ = 0;
};

}  // namespace xllm_worker
