// The modes of xllm_core_probe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace xllm::worker::probe {

// {"num_blocks", "block_size", "ops": [["grow", name, num_tokens] | ["release", name]]} -> what each op left
nlohmann::json probe_blocks(const nlohmann::json& input);

// {"num_blocks", "block_size", "hashes_collide", "ops"} -> what each op left. An op that cannot be done now is passed over:
//   ["begin", name, tokens], ["compute", name, at most so many tokens], ["append", name, token] once all are computed,
//   ["release", name], ["discard", name]
nlohmann::json probe_prefixes(const nlohmann::json& input);

// A whole engine over the RecallModel, step by step, with requests that arrive before given steps.
nlohmann::json probe_schedule(const nlohmann::json& input);

// Serves stdin and stdout as the worker does, over the RecallModel. Returns the exit code.
int serve(const nlohmann::json& settings);

// Parses the options as the worker does and prints them. Returns the exit code.
int print_options(const std::vector<std::string>& args);

}  // namespace xllm::worker::probe
