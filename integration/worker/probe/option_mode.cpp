#include <iostream>

#include "core_probe.h"
#include "options.h"
#include "ranks/rank_config.h"

namespace xllm_worker::probe {

using nlohmann::json;

int print_options(const std::vector<std::string>& args) {
  try {
    const WorkerOptions options = parse_options(args);
    if (options.help) {
      std::cout << help_text();
      return 0;
    }
    const DeviceChoice device = parse_device(options);
    const RankConfig config = resolve_rank_config(options, process_environment);
    const json output = {{"model", options.model},
                         {"dtype", options.dtype},
                         {"enable_graph", options.enable_graph},
                         {"block_size", options.block_size},
                         {"enable_prefix_cache", options.enable_prefix_cache},
                         {"max_seqs_per_batch", options.max_seqs_per_batch},
                         {"num_blocks", options.num_blocks.value_or(-1)},
                         {"kv_cache_memory", options.kv_cache_memory.value_or(ByteSize{-1}).bytes},
                         {"python_model_path", options.python_model_path},
                         {"device_kind", static_cast<int>(device.kind)},
                         {"device_index", device.index},
                         {"rank", config.rank},
                         {"ranks", config.size},
                         {"local_rank", config.local_rank},
                         {"store_address", config.host + ":" + std::to_string(config.port)},
                         {"spawns_ranks", config.spawns_ranks},
                         {"uses_agent_store", config.uses_agent_store}};
    std::cout << output << "\n";
    return 0;
  } catch (const OptionError& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}

}  // namespace xllm_worker::probe
