#include "ranks/rank_config.h"

#include <charconv>
#include <cstdlib>

namespace xllm_worker {

namespace {

int64_t read_number(const char* name, const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw OptionError(std::string(name) + "=" + text + " in the environment: expected a number of at least 0");
  }
  return value;
}

void check_same(const char* flag, const std::string& given, const char* variable, const std::string& found) {
  if (given == found) return;
  throw OptionError(std::string("--") + flag + "=" + given + " contradicts " + variable + "=" + found +
                    " in the environment");
}

std::optional<RankConfig> rank_config_from_environment(const WorkerOptions& options, const Environment& environment) {
  const auto rank = environment("RANK");
  const auto size = environment("WORLD_SIZE");
  const auto host = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  if (!rank || !size || !host || !port) return std::nullopt;
  if (options.tp_size) check_same("tp_size", std::to_string(*options.tp_size), "WORLD_SIZE", *size);
  if (options.tp_rank) check_same("tp_rank", std::to_string(*options.tp_rank), "RANK", *rank);
  if (!options.tp_host.empty()) check_same("tp_host", options.tp_host, "MASTER_ADDR", *host);
  if (options.tp_port) check_same("tp_port", std::to_string(*options.tp_port), "MASTER_PORT", *port);
  RankConfig config;
  config.rank = read_number("RANK", *rank);
  config.size = read_number("WORLD_SIZE", *size);
  config.host = *host;
  config.port = read_number("MASTER_PORT", *port);
  const auto local_rank = environment("LOCAL_RANK");
  config.local_rank = local_rank ? read_number("LOCAL_RANK", *local_rank) : config.rank;
  config.uses_agent_store = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  // After a restart, the agent's store still has the keys of the failed run.
  config.store_prefix = "xllm_worker/" + environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return config;
}

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

RankConfig resolve_rank_config(const WorkerOptions& options, const Environment& environment) {
  RankConfig config;
  if (const auto found = rank_config_from_environment(options, environment)) {
    config = *found;
  } else {
    config.size = options.tp_size.value_or(1);
    config.rank = config.local_rank = options.tp_rank.value_or(0);
    config.host = options.tp_host.empty() ? "127.0.0.1" : options.tp_host;
    config.port = options.tp_port.value_or(0);
    config.spawns_ranks = config.size > 1 && !options.tp_rank;
    config.store_prefix = "xllm_worker/0";
    if (options.tp_rank && config.size > 1 && !options.tp_port) {
      throw OptionError("--tp_rank needs --tp_port, the port of rank 0's store");
    }
  }
  if (config.size < 1 || config.rank >= config.size) {
    throw OptionError("rank " + std::to_string(config.rank) + " is out of range for " + std::to_string(config.size) +
                      " ranks");
  }
  return config;
}

}  // namespace xllm_worker
