// Test program: drives the worker's core without a model and without libtorch.
//   xllm_core_probe blocks|prefixes|schedule   one JSON value in, one out, line by line
//   xllm_core_probe serve SETTINGS             the worker's loop over the fake RecallModel
//   xllm_core_probe options FLAG...            the parsed options
#include <iostream>
#include <string>
#include <vector>

#include "answer_lines.h"
#include "core_probe.h"

namespace xllm_worker::probe {

namespace {

int run(const std::vector<std::string>& args) {
  const std::string mode = args.empty() ? "" : args[0];
  if (mode == "blocks") return answer_lines(probe_blocks);
  if (mode == "prefixes") return answer_lines(probe_prefixes);
  if (mode == "schedule") return answer_lines(probe_schedule);
  if (mode == "options") return print_options({args.begin() + 1, args.end()});
  if (mode == "serve") return serve(nlohmann::json::parse(args.at(1)));
  std::cerr << "error: unknown mode '" << mode << "'\n";
  return 2;
}

}  // namespace

}  // namespace xllm_worker::probe

int main(int argc, char** argv) { return xllm_worker::probe::run({argv + 1, argv + argc}); }
