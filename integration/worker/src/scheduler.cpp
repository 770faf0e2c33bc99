#include "scheduler.h"

#include <algorithm>
#include <limits>
#include <span>
#include <unordered_set>
#include <utility>

namespace xllm_worker {

namespace {

int64_t arrival(const std::unique_ptr<Sequence>& sequence) { return sequence->request.line; }

void insert_by_arrival(auto& sequences, std::unique_ptr<Sequence> sequence) {
  sequences.insert(std::ranges::upper_bound(sequences, arrival(sequence), {}, arrival), std::move(sequence));
}

}  // namespace

Scheduler::Scheduler(SchedulerLimits limits, BlockManager& blocks) : limits_(limits), blocks_(blocks) {
  for (int64_t slot = limits.max_seqs; slot-- > 0;) free_state_slots_.push_back(static_cast<int32_t>(slot));
}

std::vector<ScheduledSequence> Scheduler::schedule() {
  std::vector<ScheduledSequence> step;
  schedule_decodes(step);
  int64_t budget = limits_.max_tokens - static_cast<int64_t>(step.size());
  if (!step.empty()) budget = std::min(budget, limits_.max_mixed_prefill_tokens);
  schedule_prompts(step, budget);
  // Prompts that have begun may hold all pages of a sliding window. Then the youngest ones give theirs back.
  while (step.empty() && num_running() > 1) {
    preempt_youngest();
    schedule_prompts(step, budget);
  }
  return step;
}

void Scheduler::schedule_decodes(std::vector<ScheduledSequence>& step) {
  // By index: preemption removes sequences from the end.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.is_decode() && make_room_to_decode(sequence)) step.push_back({&sequence, 1});
  }
}

void Scheduler::schedule_prompts(std::vector<ScheduledSequence>& step, int64_t budget) {
  const size_t num_decodes = step.size();
  // A prompt that does not fit into the budget gets at least half of it. The rest is for prompts of at most half its
  // length, so that they do not wait for it.
  int64_t longest = std::numeric_limits<int64_t>::max();
  const auto grant = [&](Sequence& prompt) {
    const int64_t num_pending = prompt.num_pending();
    int64_t num_new = num_pending;
    if (num_pending > budget) {
      num_new = budget - budget / 2;
      longest = num_pending / 2;
    }
    num_new = std::min(num_new, blocks_.windows().max_tokens(prompt.group_blocks) - prompt.num_cached);
    if (num_new == 0) return;
    blocks_.windows().grow(prompt.group_blocks, prompt.num_cached + num_new);
    step.push_back({&prompt, num_new});
    budget -= num_new;
  };
  size_t i = 0;
  const auto grant_running_before = [&](int64_t arrival) {
    for (; i < running_.size() && running_[i]->request.line < arrival; ++i) {
      Sequence& prompt = *running_[i];
      if (budget > 0 && !prompt.is_decode() && prompt.num_pending() <= longest) grant(prompt);
    }
  };
  for (size_t next = 0; budget > 0 && next < waiting_.size() && num_running() < limits_.max_seqs;) {
    Sequence& prompt = *waiting_[next];
    grant_running_before(prompt.request.line);
    if (budget == 0) break;
    if (prompt.num_tokens() > longest) {
      ++next;
      continue;
    }
    if (blocks_.windows().max_tokens({}) == 0 || !admit(next)) break;
    ++i;  // admit() has inserted it at i
    grant(prompt);
  }
  grant_running_before(std::numeric_limits<int64_t>::max());
  // Tokens that no shorter prompt needs: to the shortest cut prompt first.
  for (size_t part = step.size(); part-- > num_decodes && budget > 0;) {
    Sequence& prompt = *step[part].sequence;
    const int64_t end = prompt.num_cached + step[part].num_new;
    const int64_t num_more = std::min({budget, prompt.num_pending() - step[part].num_new,
                                       blocks_.windows().max_tokens(prompt.group_blocks) - end});
    blocks_.windows().grow(prompt.group_blocks, end + num_more);
    step[part].num_new += num_more;
    budget -= num_more;
  }
}

bool Scheduler::admit(size_t index) {
  Sequence& sequence = *waiting_[index];
  // Allocates all pages at once: a prompt that runs out of pages half way would block the pages that others need.
  const auto num_cached = blocks_.allocate(sequence.blocks, sequence.tokens);
  if (!num_cached) return false;
  sequence.num_cached = *num_cached;
  sequence.state_slot = free_state_slots_.back();
  free_state_slots_.pop_back();
  if (!sequence.has_started()) {
    sequence.first_scheduled = Clock::now();
    ++num_dequeued_;
  }
  insert_by_arrival(running_, std::move(waiting_[index]));
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(index));
  return true;
}

bool Scheduler::make_room_to_decode(Sequence& sequence) {
  const int64_t num_tokens = sequence.num_cached + 1;
  while (!blocks_.grow(sequence.blocks, num_tokens) || !blocks_.windows().grow(sequence.group_blocks, num_tokens)) {
    const bool is_youngest = running_.back().get() == &sequence;
    preempt_youngest();
    if (is_youngest) return false;
  }
  return true;
}

void Scheduler::preempt_youngest() { preempt(running_.size() - 1); }

void Scheduler::preempt(size_t index) {
  std::unique_ptr<Sequence> sequence = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  blocks_.free(sequence->blocks);
  blocks_.windows().free(sequence->group_blocks);
  free_state_slot(*sequence);
  // Keeps the generated tokens. After the restart, all tokens that are not cached are computed like a prompt.
  sequence->num_cached = 0;
  insert_by_arrival(waiting_, std::move(sequence));
  ++num_preemptions_;
}

std::vector<const Sequence*> Scheduler::all() const {
  std::vector<const Sequence*> sequences;
  for (const auto& sequence : running_) sequences.push_back(sequence.get());
  for (const auto& sequence : waiting_) sequences.push_back(sequence.get());
  std::ranges::stable_sort(sequences, {}, [](const Sequence* sequence) { return sequence->request.line; });
  return sequences;
}

void Scheduler::update_computed(const ScheduledSequence& part) {
  Sequence& sequence = *part.sequence;
  const int64_t num_before = std::exchange(sequence.num_cached, sequence.num_cached + part.num_new);
  blocks_.windows().free_before_window(sequence.group_blocks, sequence.num_cached);
  const std::span<const int32_t> tokens = sequence.tokens;
  blocks_.cache_full_blocks(sequence.blocks, tokens.first(static_cast<size_t>(sequence.num_cached)), num_before);
}

void Scheduler::discard_pages_of(std::span<const Sequence* const> sequences) {
  std::unordered_set<int32_t> wrong;
  for (const Sequence* sequence : sequences) {
    blocks_.uncache(sequence->blocks);
    wrong.insert(sequence->blocks.begin(), sequence->blocks.end());
  }
  const auto is_wrong = [&](int32_t block) { return wrong.contains(block); };
  for (size_t i = running_.size(); i-- > 0;) {
    const Sequence* other = running_[i].get();
    if (std::ranges::find(sequences, other) == sequences.end() && std::ranges::any_of(other->blocks, is_wrong)) {
      preempt(i);
    }
  }
}

void Scheduler::remove(const Sequence& sequence, bool has_failed) {
  const auto is_it = [&](const auto& other) { return other.get() == &sequence; };
  if (const auto found = std::ranges::find_if(waiting_, is_it); found != waiting_.end()) {
    if (!sequence.has_started()) ++num_dequeued_;
    waiting_.erase(found);  // it has no pages
    return;
  }
  const auto found = std::ranges::find_if(running_, is_it);
  if (has_failed) {
    blocks_.discard((*found)->blocks);
  } else {
    blocks_.free((*found)->blocks);
  }
  blocks_.windows().free((*found)->group_blocks);
  free_state_slot(**found);
  running_.erase(found);
}

void Scheduler::free_state_slot(Sequence& sequence) {
  free_state_slots_.push_back(sequence.state_slot);
  sequence.state_slot = -1;
}

const Sequence* Scheduler::find(std::string_view request_id) const {
  for (const auto& sequence : running_) {
    if (sequence->request.id == request_id) return sequence.get();
  }
  for (const auto& sequence : waiting_) {
    if (sequence->request.id == request_id) return sequence.get();
  }
  return nullptr;
}

}  // namespace xllm_worker
