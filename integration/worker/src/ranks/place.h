// Which rank of which group this process is: from the options, from torchrun's environment, or the first of a group
// that it starts itself.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "options.h"

namespace xllm::worker {

struct RankPlace {
  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;  // among the ranks of this machine
  std::string host;
  int64_t port = 0;              // of the store where the ranks meet; 0: any, chosen by rank 0
  bool starts_others = false;    // this process starts ranks 1, 2, ... itself
  bool store_is_served = false;  // by torchrun's agent; else rank 0 serves it
  std::string store_prefix;      // of this run's keys
};

using Environment = std::function<std::optional<std::string>(const char* name)>;
std::optional<std::string> process_environment(const char* name);

// torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where all are set, say what no option says; an option that
// says otherwise is an OptionError. With --tp_size alone, this process is rank 0 and starts the others.
RankPlace resolve_place(const WorkerOptions& options, const Environment& environment);

}  // namespace xllm::worker
