// Lets tests drive the worker's parts without a model: JSON Lines in, JSON Lines out.
//   xllm_core_probe blocks|schedule|batch|sample   one JSON value in, one out, line by line
//   xllm_core_probe serve SETTINGS                 the worker's loop over a model made of arithmetic
//   xllm_core_probe options FLAG...                the parsed options
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "core_probe.h"
#include "options.h"

namespace xllm::worker::probe {

using nlohmann::json;

namespace {

int print_options(const std::vector<std::string>& args) {
  try {
    const WorkerOptions options = parse_options(args);
    if (options.help) {
      std::cout << help_text();
      return 0;
    }
    const DeviceChoice device = parse_device(options);
    const json output = {{"model", options.model},
                         {"dtype", options.dtype},
                         {"enable_graph", options.enable_graph},
                         {"block_size", options.block_size},
                         {"max_seqs_per_batch", options.max_seqs_per_batch},
                         {"num_blocks", options.num_blocks.value_or(-1)},
                         {"kv_cache_memory", options.kv_cache_memory.value_or(ByteSize{-1}).bytes},
                         {"python_model_path", options.python_model_path},
                         {"device_kind", static_cast<int>(device.kind)},
                         {"device_index", device.index}};
    std::cout << output << "\n";
    return 0;
  } catch (const OptionError& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}

int answer_lines(json (*answer)(const json&)) {
  for (std::string line; std::getline(std::cin, line);) {
    json output;
    try {
      output = answer(json::parse(line));
    } catch (const std::exception& error) {
      output = {{"error", error.what()}};
    }
    std::cout << output << std::endl;
  }
  return 0;
}

int run(const std::vector<std::string>& args) {
  const std::string mode = args.empty() ? "" : args[0];
  if (mode == "blocks") return answer_lines(probe_blocks);
  if (mode == "schedule") return answer_lines(probe_schedule);
  if (mode == "batch") return answer_lines(probe_batch);
  if (mode == "sample") return answer_lines(probe_sample);
  if (mode == "options") return print_options({args.begin() + 1, args.end()});
  if (mode == "serve") {
    serve(json::parse(args.at(1)));
    return 0;
  }
  std::cerr << "error: unknown mode '" << mode << "'\n";
  return 2;
}

}  // namespace

}  // namespace xllm::worker::probe

int main(int argc, char** argv) { return xllm::worker::probe::run({argv + 1, argv + argc}); }
