// JSON Lines in and out: one request or command a line on stdin, one event a line on stdout.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sequence.h"
#include "step_model.h"

namespace xllm::worker {

// What a request must fit into.
struct RequestLimits {
  int64_t vocab_size;
  int64_t max_model_len;   // prompt and answer together
  int64_t kv_cache_slots;  // tokens that the whole KV cache holds
};

struct StatsCommand {};

// No step runs while paused; what comes meanwhile enters one batch, whatever the timing.
struct PauseCommand {
  bool pause;  // false: resume
};

// A line that is no valid request; the id is known when the line has one.
struct InvalidLine {
  std::optional<std::string> id;
  std::string message;  // names the field, the value and the limit
};

struct InputLine {
  int64_t number = 0;  // from 1
  std::variant<Request, StatsCommand, PauseCommand, InvalidLine> content;
};

InputLine parse_input_line(std::string_view text, int64_t number, const RequestLimits& limits);

// What a client may want to know before its first request.
struct ServerInfo {
  std::string model_type;
  std::string dtype;
  std::string device;
  int64_t vocab_size;
  int64_t max_model_len;
  int64_t num_blocks;
  int64_t block_size;
  std::vector<int32_t> eos_token_ids;
};

// Events; each is one line with its line feed.
std::string ready_event(const ServerInfo& info);
std::string token_event(const std::string& id, const NextToken& token);
std::string finished_event(const Sequence& sequence, std::string_view finish_reason);
std::string error_event(const std::optional<std::string>& id,
                        int64_t line,
                        std::string_view type,
                        const std::string& message);
std::string stats_event(const nlohmann::json& executor, const nlohmann::json& scheduler);

inline constexpr std::string_view kInvalidRequest = "invalid_request";
inline constexpr std::string_view kInternal = "internal";

}  // namespace xllm::worker
