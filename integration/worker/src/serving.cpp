#include "serving.h"

#include <unistd.h>

#include <chrono>
#include <deque>
#include <exception>
#include <future>
#include <limits>
#include <string>
#include <thread>

#include "block_manager.h"
#include "engine.h"
#include "request_reader.h"

namespace xllm_worker {

namespace {

// After a signal, the current step may take this long; then its requests are reported as failed.
constexpr std::chrono::milliseconds kStopGrace{1500};
constexpr std::chrono::milliseconds kLastEventsLimit{150};  // to get them from the engine, and again to write them

// Nobody knows the model's limits before it is loaded. These refuse no request.
constexpr int64_t kAnyLength = int64_t{1} << 24;
constexpr RequestLimits kAnyRequest{std::numeric_limits<int32_t>::max(), kAnyLength, kAnyLength};

std::string stop_message(int number) { return "the worker was stopped by " + signal_name(number); }

// The lines of stdin that can be read at once.
std::deque<InputLine> waiting_lines() {
  Inbox inbox(kAnyLength);
  const LineReader reader = read_requests(STDIN_FILENO, kAnyRequest, inbox);
  std::this_thread::sleep_for(kLastEventsLimit);
  inbox.close();
  return inbox.take_all();
}

}  // namespace

void report_signals_of_start(ProtocolOutput& output, StopSignals& signals) {
  signals.set_handler([&output](int number) {
    write_log("stopped by " + signal_name(number));
    try {
      output.write(unserved_events(waiting_lines(), stop_message(number)), kLastEventsLimit);
    } catch (const std::exception& error) {
      write_log(std::string("error: ") + error.what());
    }
    flush_logs();
    _exit(128 + number);
  });
}

void serve(const WorkerOptions& options,
           const ServerInfo& info,
           StepModel& model,
           ProtocolOutput& output,
           StopSignals& signals,
           RankLink* link) {
  // Pages hold no state, so a prefix that is found in the cache would have none.
  // A hit would also lack the pages that have left a sliding window.
  const bool has_states = info.num_state_slots > 0, has_groups = !info.kv_groups.empty();
  const bool enable_prefix_cache = options.enable_prefix_cache && !has_states && !has_groups;
  if (options.enable_prefix_cache && has_states) {
    write_log("the prefix cache is off: the model has layers that keep a state per sequence");
  } else if (options.enable_prefix_cache && has_groups) {
    write_log("the prefix cache is off: --enable_kv_groups frees the pages that have left a sliding window");
  }
  BlockManager blocks(info.num_blocks, info.block_size, enable_prefix_cache, hash_page, info.kv_groups);
  const EngineLimits limits{
      {options.max_seqs_per_batch, options.max_tokens_per_batch, options.max_mixed_prefill_tokens},
      info.max_model_len,
      info.eos_token_ids};
  const RequestLimits request_limits{info.vocab_size, info.max_model_len, blocks.num_slots()};
  Engine engine(
      model,
      blocks,
      limits,
      [&](std::string_view events) { output.write(events); },
      [](const std::string& message) { write_log("a step failed: " + message); });

  Inbox inbox(options.max_queued_requests);
  const LineReader reader = read_requests(STDIN_FILENO, request_limits, inbox);
  std::promise<void> ended;
  std::future<void> has_ended = ended.get_future();
  // The caller ends the process afterwards, even if the client has not read the events.
  const auto report_and_abandon = [&](const std::string& message) {
    try {
      output.write(engine.abandon(message, inbox, kLastEventsLimit), kLastEventsLimit);
    } catch (const std::exception& error) {
      write_log(std::string("error: ") + error.what());
    }
  };
  struct HandlersEnd {  // the handlers use the objects above
    StopSignals& signals;
    RankLink* link;
    ~HandlersEnd() {
      signals.set_handler([](int) {});
      if (link != nullptr) link->set_on_stuck(nullptr);
    }
  };
  const HandlersEnd handlers_end{signals, link};
  if (link != nullptr) link->set_on_stuck(report_and_abandon);
  signals.set_handler([&](int number) {
    const std::string message = stop_message(number);
    engine.stop(message);
    inbox.close();
    if (has_ended.wait_for(kStopGrace) == std::future_status::ready) return;
    report_and_abandon(message);
    flush_logs();
    _exit(128 + number);
  });
  engine.run(inbox);
  ended.set_value();
  signals.set_handler([](int) {});
  model.shutdown();
}

}  // namespace xllm_worker
