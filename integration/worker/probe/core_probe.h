// The modes of xllm_core_probe: each answers one JSON value with another.
#pragma once

#include <nlohmann/json.hpp>

namespace xllm::worker::probe {

// {"num_blocks", "block_size", "ops": [["grow", name, num_tokens] | ["release", name]]}
nlohmann::json probe_blocks(const nlohmann::json& input);

// A whole engine over the RecallModel, step by step, with requests that arrive before given steps.
nlohmann::json probe_schedule(const nlohmann::json& input);

// Serves stdin and stdout as the worker does, over the RecallModel.
void serve(const nlohmann::json& settings);

// {"block_size", "entries": [{"tokens", "num_cached", "blocks", "wants_logits"}]} -> every tensor of the batch
nlohmann::json probe_batch(const nlohmann::json& input);

// {"logits": [[number or null for NaN]], "dtype"} -> tokens
nlohmann::json probe_sample(const nlohmann::json& input);

}  // namespace xllm::worker::probe
