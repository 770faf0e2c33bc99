#include "ranks/place.h"

#include <charconv>
#include <cstdlib>

namespace xllm::worker {

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

std::optional<RankPlace> place_of_environment(const WorkerOptions& options, const Environment& environment) {
  const auto rank = environment("RANK");
  const auto size = environment("WORLD_SIZE");
  const auto host = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  if (!rank || !size || !host || !port) return std::nullopt;
  if (options.tp_size) check_same("tp_size", std::to_string(*options.tp_size), "WORLD_SIZE", *size);
  if (options.tp_rank) check_same("tp_rank", std::to_string(*options.tp_rank), "RANK", *rank);
  if (!options.tp_host.empty()) check_same("tp_host", options.tp_host, "MASTER_ADDR", *host);
  if (options.tp_port) check_same("tp_port", std::to_string(*options.tp_port), "MASTER_PORT", *port);
  RankPlace place;
  place.rank = read_number("RANK", *rank);
  place.size = read_number("WORLD_SIZE", *size);
  place.host = *host;
  place.port = read_number("MASTER_PORT", *port);
  const auto local_rank = environment("LOCAL_RANK");
  place.local_rank = local_rank ? read_number("LOCAL_RANK", *local_rank) : place.rank;
  place.store_is_served = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  // A restart by the agent finds the keys of the run that failed.
  place.store_prefix = "xllm_worker/" + environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return place;
}

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

RankPlace resolve_place(const WorkerOptions& options, const Environment& environment) {
  RankPlace place;
  if (const auto found = place_of_environment(options, environment)) {
    place = *found;
  } else {
    place.size = options.tp_size.value_or(1);
    place.rank = place.local_rank = options.tp_rank.value_or(0);
    place.host = options.tp_host.empty() ? "127.0.0.1" : options.tp_host;
    place.port = options.tp_port.value_or(0);
    place.starts_others = place.size > 1 && !options.tp_rank;
    place.store_prefix = "xllm_worker/0";
    if (options.tp_rank && place.size > 1 && !options.tp_port) {
      throw OptionError("--tp_rank needs --tp_port, the port where the ranks meet");
    }
  }
  if (place.size < 1 || place.rank >= place.size) {
    throw OptionError("rank " + std::to_string(place.rank) + " is outside of the " + std::to_string(place.size) +
                      " ranks of tp_size");
  }
  return place;
}

}  // namespace xllm::worker
