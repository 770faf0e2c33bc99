// xllm_worker: serves one model over JSON Lines. Exit codes: 0 done, 1 could not start or go on, 2 wrong options,
// 128 + number stopped by a signal.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <future>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine.h"
#include "line_io.h"
#include "model_host.h"
#include "native/collectives.h"
#include "options.h"
#include "ranks/roles.h"
#include "stop_signals.h"

namespace xllm::worker {

namespace {

int report(const std::string& message, int exit_code) {
  std::cerr << "error: " + message + "\n" << std::flush;  // in one piece, between those of other ranks
  return exit_code;
}

// How long a step may take to end after a signal, before its requests are reported without it.
constexpr std::chrono::milliseconds kStopGrace{1500};
constexpr std::chrono::milliseconds kLastEventsLimit{150};  // for the engine to give them, then for the client's room

// Requests from stdin until its end or a signal, events to the output. The link: of the model's ranks, if it has several.
void serve(const WorkerOptions& options, const ServerInfo& info, StepModel& model, ProtocolOutput& output,
           StopSignals& signals, RankLink* link = nullptr) {
  BlockManager blocks(info.num_blocks, info.block_size, options.enable_prefix_cache);
  const EngineLimits limits{
      {options.max_seqs_per_batch, options.max_tokens_per_batch}, info.max_model_len, info.eos_token_ids};
  const RequestLimits request_limits{info.vocab_size, info.max_model_len, blocks.num_slots()};
  Engine engine(
      model,
      blocks,
      limits,
      [&](std::string_view events) { output.write(events); },
      [](const std::string& message) { std::cerr << "a step failed: " << message << std::endl; });

  output.write(ready_event(info));
  Inbox inbox;
  const LineReader reader(
      STDIN_FILENO,
      [&](std::string_view line, int64_t number) { inbox.put(parse_input_line(line, number, request_limits)); },
      [&] { inbox.close(); });
  std::promise<void> ended;
  std::future<void> has_ended = ended.get_future();
  // Whoever calls it ends the process then, whether or not a client hears of it.
  const auto give_up = [&](const std::string& message) {
    try {
      output.write(engine.abandon(message, inbox, kLastEventsLimit), kLastEventsLimit);
    } catch (const std::exception& error) {
      report(error.what(), 1);
    }
  };
  struct HandlersEnd {  // before what they use is gone
    StopSignals& signals;
    RankLink* link;
    ~HandlersEnd() {
      signals.set_handler([](int) {});
      if (link != nullptr) link->set_on_stuck(nullptr);
    }
  };
  const HandlersEnd handlers_end{signals, link};
  if (link != nullptr) link->set_on_stuck(give_up);
  signals.set_handler([&](int number) {
    const std::string message = "the worker was stopped by " + signal_name(number);
    engine.stop(message);
    inbox.close();
    if (has_ended.wait_for(kStopGrace) == std::future_status::ready) return;
    give_up(message);
    std::fflush(nullptr);
    _exit(128 + number);
  });
  engine.run(inbox);
  ended.set_value();
  signals.set_handler([](int) {});
  model.shutdown();
}

int exit_code_of(const StopSignals& signals) { return signals.received() == 0 ? 0 : 128 + signals.received(); }

void serve_alone(const WorkerOptions& options, const RankPlace& place, StopSignals& signals) {
  ProtocolOutput output;
  check_checkpoint(options.model);
  start_python(options);
  const std::unique_ptr<LoadedModel> loaded = load_model(options, place);
  const ServerInfo info = make_server_info(options, *loaded);
  TorchStepModel model(
      StepExecutor(prepare_model(options, info, *loaded, std::nullopt), info.block_size, loaded->device()));
  serve(options, info, model, output, signals);
}

// One rank's life, once it has met the others.
void serve_as_rank(const WorkerOptions& options, RankGroup& ranks, ProtocolOutput& output, StopSignals& signals) {
  const RankPlace& place = ranks.place();
  const std::chrono::seconds start_limit(options.tp_start_timeout);
  start_python(options);
  const std::unique_ptr<LoadedModel> loaded = load_model(options, place);
  const ServerInfo info = make_server_info(options, *loaded);
  agree(ranks, rank_info(options, info, *loaded), start_limit);

  ParallelArgs parallel;
  parallel.tp_rank(place.rank).tp_size(place.size).host(place.host).port(place.port);
  executor::GroupOptions group_options;
  group_options.backend = options.tp_backend == "auto" ? "" : options.tp_backend;
  group_options.device = loaded->device().str();
  group_options.store_prefix = place.store_prefix + "/group";
  group_options.timeout_seconds = static_cast<double>(std::max(options.tp_start_timeout, options.tp_timeout));
  std::optional<executor::TensorParallelGroup> group =
      for_user([&] { return executor::TensorParallelGroup::join(parallel, group_options); });
  StepExecutor executor(prepare_model(options, info, *loaded, group), info.block_size, loaded->device());
  ranks.link().watch_collectives(native::count_collectives(group->name()));
  const auto leave = [&] {
    ranks.link().watch_collectives(nullptr);
    group->leave();
  };
  if (place.rank != 0) {
    signals.set_handler([](int) {});  // Ctrl-C reaches all ranks of a terminal: rank 0 ends, and tells the others
    return follow(ranks, std::move(executor), leave);
  }
  LeaderModel model(std::move(executor), ranks, leave);
  serve(options, info, model, output, signals, &ranks.link());
}

// What a rank says last when it cannot go on: what it knows of the others, rather than what came of that here.
std::string last_words(RankGroup& ranks, const std::string& message) {
  const auto failure = ranks.link().failure(std::chrono::milliseconds(1000));
  const std::string self = "rank " + std::to_string(ranks.place().rank) + ": ";
  if (!failure) ranks.link().abort(self + message);
  // All ranks find the same fault, in a checkpoint say: then it is no rank's.
  return failure && !failure->ends_with(": " + message) ? *failure : message;
}

// Ends the process itself: other threads may be stuck in collectives with ranks that are gone, and need no wait.
[[noreturn]] void run_rank(const WorkerOptions& options, const std::vector<std::string>& args, const RankPlace& place,
                           StopSignals& signals) {
  ProtocolOutput output;
  RendezvousOptions meeting;
  meeting.limit = std::chrono::seconds(options.tp_start_timeout);
  meeting.silence = std::chrono::seconds(options.tp_timeout);
  int exit_code = 0;
  std::unique_ptr<RankGroup> ranks;
  try {
    check_checkpoint(options.model);
    ranks = std::make_unique<RankGroup>(place, args, meeting);
    serve_as_rank(options, *ranks, output, signals);
    exit_code = exit_code_of(signals);
  } catch (const std::exception& error) {
    const std::string message = ranks ? last_words(*ranks, error.what()) : error.what();
    exit_code = report(place.rank == 0 ? message : "on rank " + std::to_string(place.rank) + ": " + message, 1);
  }
  if (ranks) ranks->processes().wait(std::chrono::milliseconds(exit_code == 0 ? 0 : 1000));
  std::fflush(nullptr);
  _exit(exit_code);
}

int run(const std::vector<std::string>& args) {
  try {
    const WorkerOptions options = parse_options(args);
    if (options.help) {
      std::cout << help_text();
      return 0;
    }
    StopSignals signals;
    const RankPlace place = resolve_place(options, process_environment);
    if (place.size > 1) run_rank(options, args, place, signals);
    serve_alone(options, place, signals);
    if (signals.received() != 0) {  // who stopped it waits for its end: no teardown of libraries, which can be slow
      std::fflush(nullptr);
      _exit(exit_code_of(signals));
    }
    return 0;
  } catch (const OptionError& error) {
    return report(error.what(), 2);
  } catch (const std::exception& error) {
    return report(error.what(), 1);
  }
}

}  // namespace

}  // namespace xllm::worker

int main(int argc, char** argv) { return xllm::worker::run({argv + 1, argv + argc}); }
