// Determines the rank, the number of ranks and the store address of this process, from options or torchrun's
// environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "options.h"

namespace xllm_worker {

struct RankConfig {
  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;  // on this machine
  std::string host;
  int64_t port = 0;              // of the store for the rendezvous; 0: rank 0 picks a free one
  bool spawns_ranks = false;    // this process is rank 0 and starts the other ranks
  bool uses_agent_store = false;  // torchrun's agent serves the store; else rank 0 does
  std::string store_prefix;      // prefix of this run's keys in the store
};

using Environment = std::function<std::optional<std::string>(const char* name)>;
std::optional<std::string> process_environment(const char* name);

// If RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all set (by torchrun), they are used; an option that contradicts
// them is an OptionError. Without them and with --tp_size alone, this process is rank 0 and starts the others.
RankConfig resolve_rank_config(const WorkerOptions& options, const Environment& environment);

}  // namespace xllm_worker
