#include "protocol.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "strict_json.h"

namespace xllm_worker {

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

class InvalidRequest : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void refuse(const std::string& message) { throw InvalidRequest(message); }

[[noreturn]] void refuse_value(const std::string& field, const json& value, const std::string& expected) {
  refuse(field + " is " + dump_json(value, kMaxQuoted) + "; expected " + expected);
}

void check_keys(const json& object, const std::vector<std::string>& allowed, const std::vector<std::string>& required) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(allowed.begin(), allowed.end(), key) != allowed.end()) continue;
    std::string names;
    for (const std::string& name : allowed) names += (names.empty() ? "" : ", ") + name;
    refuse("unknown key " + dump_json(key, kMaxQuoted) + "; allowed: " + names);
  }
  for (const std::string& key : required) {
    if (!object.contains(key)) refuse("key \"" + key + "\" is missing");
  }
}

int64_t read_int(const json& value, const std::string& field, int64_t min, int64_t max, const std::string& expected) {
  const bool fits = value.is_number_integer() &&
                    !(value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int64_t>::max());
  if (!fits || value.get<int64_t>() < min || value.get<int64_t>() > max) refuse_value(field, value, expected);
  return value.get<int64_t>();
}

std::vector<int32_t> read_token_ids(const json& value, const std::string& field, int64_t vocab_size) {
  const std::string range = "token ids from 0 to " + std::to_string(vocab_size - 1);
  if (!value.is_array()) refuse_value(field, value, "an array of " + range);
  std::vector<int32_t> ids;
  ids.reserve(value.size());
  for (const json& id : value) {
    const std::string name = field + "[" + std::to_string(ids.size()) + "]";
    ids.push_back(static_cast<int32_t>(
        read_int(id, name, 0, vocab_size - 1, range + " (the vocabulary has " + std::to_string(vocab_size) + ")")));
  }
  return ids;
}

void read_bool(const json& object, const std::string& field, bool& target) {
  if (!object.contains(field)) return;
  const json& value = object.at(field);
  if (!value.is_boolean()) refuse_value(field, value, "true or false");
  target = value.get<bool>();
}

void check_length(int64_t num_tokens, const RequestLimits& limits) {
  if (num_tokens == 0) refuse("token_ids is empty; expected at least 1 token");
  if (num_tokens >= limits.max_model_len) {
    refuse("token_ids has " + std::to_string(num_tokens) + " tokens; the limit is " +
           std::to_string(limits.max_model_len - 1) + ", so that an answer of one token fits into the context of " +
           std::to_string(limits.max_model_len));
  }
  if (num_tokens > limits.kv_cache_slots) {
    refuse("token_ids has " + std::to_string(num_tokens) + " tokens; the limit is " +
           std::to_string(limits.kv_cache_slots) + ", the size of the whole KV cache");
  }
}

void check_stop_tokens(int64_t num_tokens) {
  constexpr int64_t kLimit = RequestLimits::kMaxStopTokenIds;
  if (num_tokens <= kLimit) return;
  refuse("stop_token_ids has " + std::to_string(num_tokens) + " tokens; the limit is " + std::to_string(kLimit));
}

bool is_valid_id(const json& id) {
  if (!id.is_string()) return false;
  const size_t size = id.get_ref<const std::string&>().size();
  return size >= 1 && size <= RequestLimits::kMaxIdBytes;
}

std::string read_id(const json& object) {
  const json& id = object.at("id");
  if (!is_valid_id(id)) {
    refuse_value("id", id, "a string of 1 to " + std::to_string(RequestLimits::kMaxIdBytes) + " bytes");
  }
  return id.get<std::string>();
}

Request read_request(const json& object, int64_t line, const RequestLimits& limits) {
  check_keys(object,
             {"id", "token_ids", "max_tokens", "stop_token_ids", "ignore_eos", "show_logits"},
             {"id", "token_ids", "max_tokens"});
  Request request;
  request.line = line;
  request.id = read_id(object);
  request.token_ids = read_token_ids(object.at("token_ids"), "token_ids", limits.vocab_size);
  check_length(static_cast<int64_t>(request.token_ids.size()), limits);
  request.max_tokens = read_int(object.at("max_tokens"),
                                "max_tokens",
                                1,
                                std::numeric_limits<int64_t>::max(),
                                "an integer of at least 1");
  if (object.contains("stop_token_ids")) {
    request.stop_token_ids = read_token_ids(object.at("stop_token_ids"), "stop_token_ids", limits.vocab_size);
    check_stop_tokens(std::ssize(request.stop_token_ids));
  }
  read_bool(object, "ignore_eos", request.ignore_eos);
  read_bool(object, "show_logits", request.show_logits);
  return request;
}

decltype(InputLine::content) read_command(const json& object) {
  const json& command = object.at("command");
  if (command == "cancel") {
    check_keys(object, {"command", "id"}, {"id"});
    return CancelCommand{read_id(object)};
  }
  check_keys(object, {"command"}, {});
  if (command == "stats") return StatsCommand{};
  if (command == "pause" || command == "resume") return PauseCommand{command == "pause"};
  refuse_value("command", command, "\"stats\", \"pause\", \"resume\" or \"cancel\"");
}

// Seconds; null for what the request did not reach.
ordered_json timing(const Sequence& sequence) {
  const auto seconds = [](Clock::time_point from, std::optional<Clock::time_point> to) {
    return to ? ordered_json(std::chrono::duration<double>(*to - from).count()) : ordered_json(nullptr);
  };
  const Clock::time_point arrival = sequence.request.arrival;
  ordered_json tpot = nullptr;
  if (const int64_t num_gaps = sequence.num_generated() - 1; num_gaps > 0) {
    const std::chrono::duration<double> decoding = sequence.last_token - *sequence.first_token;
    tpot = decoding.count() / static_cast<double>(num_gaps);
  }
  return {{"queue", seconds(arrival, sequence.first_scheduled)},
          {"ttft", seconds(arrival, sequence.first_token)},
          {"tpot", tpot}};
}

std::string to_line(const ordered_json& event) {
  return event.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace

InputLine parse_input_line(std::string_view text, int64_t number, const RequestLimits& limits) {
  InputLine line{number, RefusedLine{}};
  std::optional<std::string> id;
  try {
    const json object = parse_strict_json(text);
    if (!object.is_object()) refuse("the line is " + describe_json_type(object) + "; expected an object");
    if (object.contains("id") && is_valid_id(object.at("id"))) id = object.at("id").get<std::string>();
    if (object.contains("command")) {
      line.content = read_command(object);
    } else {
      line.content = read_request(object, number, limits);
    }
  } catch (const JsonError& error) {
    line.content = RefusedLine{id, std::string("the line is not valid JSON: ") + error.what()};
  } catch (const InvalidRequest& error) {
    line.content = RefusedLine{id, error.what()};
  }
  return line;
}

InputLine refuse_long_line(int64_t number, const RequestLimits& limits) {
  return {number,
          RefusedLine{std::nullopt,
                      "the line has more than " + std::to_string(limits.max_line_bytes()) +
                          " bytes, the limit for a max_model_len of " + std::to_string(limits.max_model_len)}};
}

std::string ready_event(const ServerInfo& info) {
  return to_line({{"event", "ready"},
                  {"model_type", info.model_type},
                  {"vocab_size", info.vocab_size},
                  {"max_model_len", info.max_model_len},
                  {"num_blocks", info.num_blocks},
                  {"block_size", info.block_size},
                  {"dtype", info.dtype},
                  {"device", info.device},
                  {"eos_token_ids", info.eos_token_ids}});
}

std::string token_event(const std::string& id, const NextToken& token) {
  ordered_json event = {{"id", id}, {"token_ids", {token.id}}};
  if (token.logits) event["logits"] = {{"digest", token.logits->digest}, {"top", token.logits->top}};
  return to_line(event);
}

std::string finished_event(const Sequence& sequence, std::string_view finish_reason) {
  return to_line({{"id", sequence.request.id},
                  {"finished", true},
                  {"finish_reason", finish_reason},
                  {"prompt_tokens", sequence.num_prompt_tokens},
                  {"completion_tokens", sequence.num_generated()},
                  {"timing", timing(sequence)}});
}

std::string error_event(const std::optional<std::string>& id,
                        int64_t line,
                        std::string_view type,
                        const std::string& message) {
  return to_line({{"id", id ? ordered_json(*id) : ordered_json(nullptr)},
                  {"line", line},
                  {"error", {{"type", type}, {"message", message}}}});
}

std::string unserved_events(const std::deque<InputLine>& lines, const std::string& message) {
  std::string events;
  for (const InputLine& line : lines) {
    if (const auto* request = std::get_if<Request>(&line.content)) {
      events += error_event(request->id, line.number, kInternal, message);
    } else if (const auto* refused = std::get_if<RefusedLine>(&line.content)) {
      events += error_event(refused->id, line.number, refused->type, refused->message);
    }
  }
  return events;
}

std::string stats_event(const json& executor, const json& scheduler) {
  return to_line({{"event", "stats"}, {"executor", executor}, {"scheduler", scheduler}});
}

}  // namespace xllm_worker
