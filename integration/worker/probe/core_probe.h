// The modes of xllm_core_probe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace xllm_worker::probe {

// {"num_blocks", "block_size", "ops": [["grow", name, num_tokens] | ["release", name]]} -> the state after each op
nlohmann::json probe_blocks(const nlohmann::json& input);

// {"num_blocks", "block_size", "hashes_collide", "ops"} -> the state after each op. Impossible ops are skipped:
//   ["begin", name, tokens], ["compute", name, max tokens], ["append", name, token] once all are computed,
//   ["release", name], ["discard", name]
nlohmann::json probe_prefixes(const nlohmann::json& input);

// Runs an engine over the RecallModel step by step. Each request arrives before a given step.
nlohmann::json probe_schedule(const nlohmann::json& input);

// Serves stdin and stdout as the worker does, over the RecallModel. Returns the exit code.
int serve(const nlohmann::json& settings);

// Parses the options as the worker does and prints them. Returns the exit code.
int print_options(const std::vector<std::string>& args);

}  // namespace xllm_worker::probe
