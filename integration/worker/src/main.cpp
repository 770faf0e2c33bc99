// xllm_worker: serves one model over JSON Lines. Exit codes: 0 success, 1 failure, 2 wrong options, 128 + number for a
// signal.
#include <unistd.h>

#include <chrono>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "line_io.h"
#include "model_host.h"
#include "native/collectives.h"
#include "options.h"
#include "ranks/roles.h"
#include "serving.h"
#include "stop_signals.h"

namespace xllm_worker {

namespace {

int report(const std::string& message, int exit_code) {
  write_log("error: " + message);
  return exit_code;
}

int exit_code_of(const StopSignals& signals) { return signals.received() == 0 ? 0 : 128 + signals.received(); }

void serve_single_rank(const WorkerOptions& options, const RankConfig& config, ProtocolOutput& output,
                       StopSignals& signals) {
  check_checkpoint(options.model);
  report_signals_of_start(output, signals);
  start_python(options);
  const std::unique_ptr<LoadedModel> loaded = load_model(options, config);
  const ServerInfo info = make_server_info(options, *loaded);
  TorchStepModel model(
      StepExecutor(prepare_model(options, info, *loaded, std::nullopt), info.block_size, info.num_state_slots > 0,
                   std::ssize(info.kv_groups), loaded->device()));
  output.write(ready_event(info));
  serve(options, info, model, output, signals);
}

// Loads the model on this rank, joins the process group, and serves (rank 0) or follows (others).
void serve_rank(const WorkerOptions& options, RankGroup& ranks, ProtocolOutput& output, StopSignals& signals) {
  const RankConfig& config = ranks.config();
  const std::chrono::seconds start_limit(options.tp_start_timeout);
  start_python(options);
  const std::unique_ptr<LoadedModel> loaded = load_model(options, config);
  const ServerInfo info = make_server_info(options, *loaded);
  check_ranks_agree(ranks, rank_info(options, info, *loaded), start_limit);

  ParallelArgs parallel;
  parallel.tp_rank(config.rank).tp_size(config.size).host(config.host).port(config.port);
  xllm_executor::GroupOptions group_options;
  group_options.backend = options.tp_backend == "auto" ? "" : options.tp_backend;
  group_options.device = loaded->device().str();
  group_options.store_prefix = config.store_prefix + "/group";
  group_options.timeout_seconds = static_cast<double>(std::max(options.tp_start_timeout, options.tp_timeout));
  std::optional<xllm_executor::TensorParallelGroup> group =
      with_user_messages([&] { return xllm_executor::TensorParallelGroup::join(parallel, group_options); });
  StepExecutor executor(prepare_model(options, info, *loaded, group), info.block_size, info.num_state_slots > 0,
                        std::ssize(info.kv_groups), loaded->device());
  ranks.link().set_collective_counter(native::count_collectives(group->name()));
  const auto leave_group = [&] {
    ranks.link().set_collective_counter(nullptr);
    group->leave();
  };
  if (config.rank != 0) {
    signals.set_handler([](int) {});  // Ctrl-C reaches all ranks of a terminal: rank 0 handles it and ends the others
    return follow(ranks, std::move(executor), leave_group);
  }
  LeaderModel model(std::move(executor), ranks, leave_group);
  output.write(ready_event(info));
  serve(options, info, model, output, signals, &ranks.link());
}

// The error message of a rank that cannot continue. A failure of another rank comes first: the local error follows from
// it.
std::string failure_message(RankGroup& ranks, const std::string& message) {
  const auto failure = ranks.link().failure(std::chrono::milliseconds(1000));
  const std::string self = "rank " + std::to_string(ranks.config().rank) + ": ";
  if (!failure) ranks.link().abort(self + message);
  // When all ranks fail in the same way, for example on a bad checkpoint, the message names no rank.
  return failure && !failure->ends_with(": " + message) ? *failure : message;
}

// Runs one of several ranks and ends with _exit: other threads may be stuck in collectives with dead ranks.
[[noreturn]] void run_rank(const WorkerOptions& options, const std::vector<std::string>& args, const RankConfig& config,
                           ProtocolOutput& output, StopSignals& signals) {
  RendezvousOptions rendezvous;
  rendezvous.start_timeout = std::chrono::seconds(options.tp_start_timeout);
  rendezvous.timeout = std::chrono::seconds(options.tp_timeout);
  int exit_code = 0;
  std::unique_ptr<RankGroup> ranks;
  try {
    check_checkpoint(options.model);
    if (config.rank == 0) report_signals_of_start(output, signals);
    ranks = std::make_unique<RankGroup>(config, args, rendezvous);
    serve_rank(options, *ranks, output, signals);
    exit_code = exit_code_of(signals);
  } catch (const std::exception& error) {
    std::ignore = signals.received();  // waits for a handler, which may end the process: the signal has ended the other ranks, too
    const std::string message = ranks ? failure_message(*ranks, error.what()) : error.what();
    exit_code = report(config.rank == 0 ? message : "on rank " + std::to_string(config.rank) + ": " + message, 1);
  }
  if (ranks) ranks->processes().wait(std::chrono::milliseconds(exit_code == 0 ? 0 : 1000));
  flush_logs();
  _exit(exit_code);
}

int run(const std::vector<std::string>& args) {
  try {
    open_standard_descriptors();
    const WorkerOptions options = parse_options(args);
    if (options.help) {
      std::cout << help_text() << std::flush;
      return std::cout ? 0 : report("stdout: the help text cannot be written", 1);
    }
    ProtocolOutput output;
    StopSignals signals;
    const RankConfig config = resolve_rank_config(options, process_environment);
    if (config.size > 1) run_rank(options, args, config, output, signals);
    serve_single_rank(options, config, output, signals);
    if (signals.received() != 0) {  // skips the teardown of libraries, which can be slow
      flush_logs();
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

}  // namespace xllm_worker

int main(int argc, char** argv) { return xllm_worker::run({argv + 1, argv + argc}); }
