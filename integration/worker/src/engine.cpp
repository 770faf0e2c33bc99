#include "engine.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace xllm_worker {

namespace {

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

nlohmann::json to_json(const std::vector<WindowGroups::Usage>& groups) {
  nlohmann::json result = nlohmann::json::array();
  for (const WindowGroups::Usage& usage : groups) {
    result.push_back({{"window", usage.group.window},
                      {"num_blocks", usage.group.num_blocks},
                      {"num_used_blocks", usage.num_used},
                      {"peak_used_blocks", usage.peak_used}});
  }
  return result;
}

nlohmann::json to_json(const StepTimes& times) {
  return {{"count", times.count}, {"seconds", std::chrono::duration<double>(times.total).count()}};
}

}  // namespace

Engine::Engine(StepModel& model, BlockManager& blocks, EngineLimits limits, Write write, Log log)
    : model_(model),
      blocks_(blocks),
      limits_(std::move(limits)),
      scheduler_(limits_.scheduler, blocks),
      write_(std::move(write)),
      log_(std::move(log)) {}

void Engine::run(Inbox& inbox) {
  inbox_ = &inbox;
  const struct Closing {  // the reader may wait for room in it
    Inbox& inbox;
    ~Closing() { inbox.close(); }
  } closing{inbox};
  try {
    serve(inbox);
  } catch (const RankFailure& failure) {
    const std::lock_guard lock(mutex_);
    fail_everything(failure.what(), inbox);
    throw;
  }
}

void Engine::serve(Inbox& inbox) {
  while (!is_stopping_ && (has_work() || !inbox.is_at_end())) {
    if (!has_work() || is_paused_) inbox.wait();
    {
      const std::lock_guard lock(mutex_);
      lines_ = inbox.take_all();
    }
    handle_lines();
    if (inbox.is_at_end()) is_paused_ = false;  // no resume command can arrive any more
    if (has_work() && !is_paused_ && !is_stopping_) step();
  }
  if (!is_stopping_) return;
  const std::lock_guard lock(mutex_);
  fail_everything(stop_message_, inbox);
}

void Engine::stop(std::string message) {
  const std::lock_guard lock(stop_mutex_);
  if (is_stopping_) return;
  stop_message_ = std::move(message);
  is_stopping_ = true;
}

std::string Engine::abandon(const std::string& message, Inbox& inbox, std::chrono::milliseconds limit) {
  // The lock is never released, so that the engine's thread cannot write an event after these.
  return mutex_.try_lock_for(limit) ? last_events(message, inbox) : "";
}

void Engine::handle(InputLine line) {
  {
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::move(line));
  }
  handle_lines();
}

void Engine::handle_lines() {
  std::unique_lock lock(mutex_);
  while (!lines_.empty()) {
    InputLine line = std::move(lines_.front());
    lines_.pop_front();
    if (auto* request = std::get_if<Request>(&line.content)) {
      accept(std::move(*request));
    } else if (const auto* refused = std::get_if<RefusedLine>(&line.content)) {
      events_ += error_event(refused->id, line.number, refused->type, refused->message);
    } else if (const auto* command = std::get_if<PauseCommand>(&line.content)) {
      is_paused_ = command->pause;
    } else if (const auto* command = std::get_if<CancelCommand>(&line.content)) {
      cancel(*command, line.number);
    } else {
      lock.unlock();  // stats_json asks the other ranks, which may not answer
      const std::string executor = model_.stats_json();
      lock.lock();
      events_ += stats(executor);
    }
    write_(std::exchange(events_, {}));
  }
}

void Engine::accept(Request request) {
  if (!active_ids_.insert(request.id).second) {
    const std::string message = "id \"" + request.id + "\" belongs to a request that is not finished";
    events_ += error_event(request.id, request.line, kInvalidRequest, message);
    ++num_duplicates_;
    update_queue();
    return;
  }
  scheduler_.add(std::make_unique<Sequence>(std::move(request)));
}

void Engine::cancel(const CancelCommand& command, int64_t line) {
  // Lines are handled between steps, so no step uses the sequence now.
  const Sequence* sequence = scheduler_.find(command.id);
  if (sequence == nullptr) {
    const std::string message = "id \"" + command.id + "\" belongs to no waiting or running request";
    events_ += error_event(command.id, line, kNotFound, message);
    return;
  }
  events_ += finished_event(*sequence, "cancelled");
  ++num_cancelled_;
  retire(*sequence, /*has_failed=*/false);
  update_queue();
}

void Engine::update_queue() {
  if (inbox_ != nullptr) inbox_->set_num_dequeued(scheduler_.num_dequeued() + num_duplicates_);
}

void Engine::step() {
  std::vector<ScheduledSequence> batch;
  {
    const std::lock_guard lock(mutex_);
    batch = scheduler_.schedule();
  }
  update_queue();
  if (batch.empty()) throw std::logic_error("the scheduler has work but made an empty step");
  StepTimes& times = times_of(batch);
  std::vector<NextToken> tokens;
  try {
    tokens = compute(batch, times);
  } catch (const RankFailure&) {
    throw;
  } catch (const std::exception& error) {
    // Only the requests of this step fail. The others continue.
    const std::lock_guard lock(mutex_);
    ++num_failed_steps_;
    log_(error.what());
    for (const ScheduledSequence& scheduled : batch) fail(*scheduled.sequence, error.what());
    write_(std::exchange(events_, {}));
    return;
  }
  const std::lock_guard lock(mutex_);
  auto token = tokens.begin();
  std::vector<const Sequence*> not_numbers;
  for (const ScheduledSequence& scheduled : batch) {
    const bool needs_token = scheduled.needs_token();
    scheduler_.update_computed(scheduled);
    num_computed_tokens_ += scheduled.num_new;
    if (!needs_token) continue;
    if (token->id == StepModel::kNotANumber) {
      not_numbers.push_back(scheduled.sequence);
    } else {
      deliver(*scheduled.sequence, *token);
    }
    ++token;
  }
  if (!not_numbers.empty()) fail_not_numbers(not_numbers);
  write_(std::exchange(events_, {}));
}

StepTimes& Engine::times_of(const std::vector<ScheduledSequence>& batch) {
  const auto is_decode = [](const ScheduledSequence& part) { return part.sequence->is_decode(); };
  if (std::ranges::all_of(batch, is_decode)) return decode_steps_;
  return std::ranges::any_of(batch, is_decode) ? mixed_steps_ : prefill_steps_;
}

std::vector<NextToken> Engine::compute(const std::vector<ScheduledSequence>& batch, StepTimes& times) {
  const struct Timer {  // a failed step counts too
    StepTimes& times;
    Clock::time_point begin = Clock::now();
    ~Timer() {
      times.total += Clock::now() - begin;
      ++times.count;
    }
  } timer{times};
  const auto num_wanted = std::count_if(batch.begin(), batch.end(), [](const auto& s) { return s.needs_token(); });
  std::vector<NextToken> tokens = model_.step(batch);
  if (std::ssize(tokens) != num_wanted) {
    throw std::logic_error("the model gave " + std::to_string(tokens.size()) + " tokens; the step wants " +
                           std::to_string(num_wanted));
  }
  return tokens;
}

void Engine::deliver(Sequence& sequence, const NextToken& token) {
  sequence.tokens.push_back(token.id);
  sequence.last_token = Clock::now();
  if (!sequence.first_token) sequence.first_token = sequence.last_token;
  ++num_generated_tokens_;
  events_ += token_event(sequence.request.id, token);
  const std::string_view reason = finish_reason(sequence);
  if (reason.empty()) return;
  events_ += finished_event(sequence, reason);
  ++num_finished_;
  retire(sequence, /*has_failed=*/false);
}

void Engine::fail_not_numbers(const std::vector<const Sequence*>& sequences) {
  // After the whole step: other sequences of the step may read the same pages.
  scheduler_.discard_pages_of(sequences);
  for (const Sequence* sequence : sequences) {
    fail(*sequence, "the logits of token " + std::to_string(sequence->num_tokens()) + " are not numbers (NaN)");
  }
}

std::string_view Engine::finish_reason(const Sequence& sequence) const {
  const Request& request = sequence.request;
  const int32_t last = sequence.tokens.back();
  if (contains(request.stop_token_ids, last)) return "stop";
  if (!request.ignore_eos && contains(limits_.eos_token_ids, last)) return "stop";
  const bool is_full = sequence.num_tokens() >= limits_.max_model_len ||
                       sequence.num_tokens() > blocks_.num_slots();  // the last token needs no slot
  return is_full || sequence.num_generated() >= request.max_tokens ? "length" : "";
}

void Engine::fail(const Sequence& sequence, const std::string& message) {
  events_ += error_event(sequence.request.id, sequence.request.line, kInternal, message);
  retire(sequence, /*has_failed=*/true);
}

void Engine::fail_everything(const std::string& message, Inbox& inbox) { write_(last_events(message, inbox)); }

std::string Engine::last_events(const std::string& message, Inbox& inbox) {
  std::string events;
  if (std::exchange(is_over_, true)) return events;
  for (const Sequence* sequence : scheduler_.all()) {
    events += error_event(sequence->request.id, sequence->request.line, kInternal, message);
  }
  std::deque<InputLine> lines = std::move(lines_);
  std::ranges::move(inbox.take_all(), std::back_inserter(lines));
  return events + unserved_events(lines, message);
}

void Engine::retire(const Sequence& sequence, bool has_failed) {
  active_ids_.erase(sequence.request.id);
  scheduler_.remove(sequence, has_failed);
}

std::string Engine::stats(const std::string& executor) const {
  const PrefixCacheCounts cache = blocks_.prefix_cache_counts();
  return stats_event(nlohmann::json::parse(executor),
                     {{"num_steps", prefill_steps_.count + mixed_steps_.count + decode_steps_.count},
                      {"num_failed_steps", num_failed_steps_},
                      {"steps",
                       {{"prefill", to_json(prefill_steps_)},
                        {"mixed", to_json(mixed_steps_)},
                        {"decode", to_json(decode_steps_)}}},
                      {"num_computed_tokens", num_computed_tokens_},
                      {"num_generated_tokens", num_generated_tokens_},
                      {"num_finished", num_finished_},
                      {"num_cancelled", num_cancelled_},
                      {"num_preemptions", scheduler_.num_preemptions()},
                      {"num_running", scheduler_.num_running()},
                      {"num_waiting", scheduler_.num_waiting()},
                      {"num_free_blocks", blocks_.num_free()},
                      {"num_blocks", blocks_.num_blocks()},
                      {"kv_groups", to_json(blocks_.windows().usage())},
                      {"prefix_cache",
                       {{"num_queried_tokens", cache.num_queried_tokens},
                        {"num_hit_tokens", cache.num_hit_tokens},
                        {"num_evicted_blocks", cache.num_evicted_blocks},
                        {"num_cached_blocks", cache.num_cached_blocks}}}});
}

}  // namespace xllm_worker
