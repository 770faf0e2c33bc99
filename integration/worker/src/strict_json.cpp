#include "strict_json.h"

#include <set>
#include <vector>

namespace xllm_worker {

using nlohmann::json;

namespace {

constexpr size_t kMaxMessage = 300;  // bytes; the library's messages repeat the whole last token

// Removes the prefix "[json.exception.parse_error.101] " of the library's messages.
std::string plain_message(const std::string& what) {
  const size_t end = what.find("] ");
  return truncate(end == std::string::npos ? what : what.substr(end + 2), kMaxMessage);
}

void check_depth(int num_open) {
  if (static_cast<size_t>(num_open) < kMaxJsonDepth) return;
  throw JsonError("it is nested more than " + std::to_string(kMaxJsonDepth) + " levels deep");
}

}  // namespace

json parse_strict_json(std::string_view text) {
  // The library takes a NUL byte for the end of the text.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw JsonError("it has a NUL byte at offset " + std::to_string(nul));
  }
  std::vector<std::set<std::string>> open_objects;
  const auto check_keys = [&](int num_open, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::array_start) {
      check_depth(num_open);
    } else if (event == json::parse_event_t::object_start) {
      check_depth(num_open);
      open_objects.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_objects.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      if (!open_objects.back().insert(key).second) {
        throw JsonError("key \"" + truncate(key, kMaxQuoted) + "\" appears twice");
      }
    }
    return true;
  };
  try {
    return json::parse(text, check_keys);
  } catch (const json::exception& error) {
    throw JsonError(plain_message(error.what()));
  }
}

std::string describe_json_type(const json& value) {
  switch (value.type()) {
    case json::value_t::null: return "null";
    case json::value_t::object: return "an object";
    case json::value_t::array: return "an array";
    case json::value_t::string: return "a string";
    case json::value_t::boolean: return "a boolean";
    case json::value_t::number_integer:
    case json::value_t::number_unsigned: return "an integer";
    case json::value_t::number_float: return "a number with a fraction or exponent";
    default: return "binary";
  }
}

std::string truncate(std::string text, size_t max_length) {
  if (text.size() <= max_length) return text;
  size_t end = max_length;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  text.resize(end);
  return text + "...";
}

std::string dump_json(const json& value, size_t max_length) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return max_length > 0 ? truncate(std::move(text), max_length) : text;
}

}  // namespace xllm_worker
