#include <iostream>

#include "core_probe.h"
#include "options.h"
#include "ranks/place.h"

namespace xllm::worker::probe {

using nlohmann::json;

int print_options(const std::vector<std::string>& args) {
  try {
    const WorkerOptions options = parse_options(args);
    if (options.help) {
      std::cout << help_text();
      return 0;
    }
    const DeviceChoice device = parse_device(options);
    const RankPlace place = resolve_place(options, process_environment);
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
                         {"rank", place.rank},
                         {"ranks", place.size},
                         {"local_rank", place.local_rank},
                         {"meeting_point", place.host + ":" + std::to_string(place.port)},
                         {"starts_others", place.starts_others},
                         {"store_is_served", place.store_is_served}};
    std::cout << output << "\n";
    return 0;
  } catch (const OptionError& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}

}  // namespace xllm::worker::probe
