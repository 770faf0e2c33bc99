// The JSON Lines protocol: parses requests and commands from stdin lines, and formats events for stdout.
#pragma once

#include <cstdint>
#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sequence.h"
#include "step_model.h"

namespace xllm_worker {

// The limits that a request is checked against.
struct RequestLimits {
  int64_t vocab_size;
  int64_t max_model_len;   // prompt and answer together
  int64_t kv_cache_slots;  // capacity of the whole KV cache in tokens

  // The longest line. It holds any request that these limits allow: 16 bytes for each token id with its separator, and
  // 4096 for everything else.
  size_t max_line_bytes() const { return static_cast<size_t>(16 * (max_model_len + kMaxStopTokenIds) + 4096); }

  static constexpr int64_t kMaxStopTokenIds = 1024;  // each new token is compared with all of them
  static constexpr size_t kMaxIdBytes = 256;         // of a request's id, which every event repeats
};

struct StatsCommand {};

// No step runs while paused. All requests that arrive in the meantime enter one batch, which makes tests deterministic.
struct PauseCommand {
  bool pause;  // false: resume
};

// Ends a waiting or running request.
struct CancelCommand {
  std::string id;
};

inline constexpr std::string_view kInvalidRequest = "invalid_request";
inline constexpr std::string_view kNotFound = "not_found";
inline constexpr std::string_view kQueueFull = "queue_full";
inline constexpr std::string_view kInternal = "internal";

// A line that is answered with an error event. The id is set if the line has a valid one.
struct RefusedLine {
  std::optional<std::string> id;
  std::string message;  // names the field, the value and the limit
  std::string_view type = kInvalidRequest;
};

struct InputLine {
  int64_t number = 0;  // from 1
  std::variant<Request, StatsCommand, PauseCommand, CancelCommand, RefusedLine> content;
};

InputLine parse_input_line(std::string_view text, int64_t number, const RequestLimits& limits);

// The answer to a line with more than max_line_bytes().
InputLine refuse_long_line(int64_t number, const RequestLimits& limits);

// Model and cache properties, sent to the client in the ready event.
struct ServerInfo {
  std::string model_type;
  std::string dtype;
  std::string device;
  int64_t vocab_size;
  int64_t max_model_len;
  int64_t num_blocks;
  int64_t block_size;
  std::vector<KvGroup> kv_groups;  // from 1 on; empty: one page table serves all layers
  int64_t num_state_slots;  // 0 for a model whose layers keep no states
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
// An error event for each request, and for each refused line. Commands get none.
std::string unserved_events(const std::deque<InputLine>& lines, const std::string& message);
std::string stats_event(const nlohmann::json& executor, const nlohmann::json& scheduler);

}  // namespace xllm_worker
