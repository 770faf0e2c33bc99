#include "strict_json.h"

#include <set>
#include <vector>

namespace xllm::worker {

using nlohmann::json;

namespace {

// Removes the prefix "[json.exception.parse_error.101] " of the library's messages.
std::string plain_message(const std::string& what) {
  const size_t end = what.find("] ");
  return end == std::string::npos ? what : what.substr(end + 2);
}

}  // namespace

json parse_strict_json(std::string_view text) {
  std::vector<std::set<std::string>> open_objects;
  const auto check_keys = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) {
      open_objects.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_objects.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      if (!open_objects.back().insert(key).second) throw JsonError("key \"" + key + "\" appears twice");
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

std::string dump_json(const json& value, size_t max_length) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (max_length > 0 && text.size() > max_length) {
    size_t end = max_length;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // a UTF-8 boundary
    text = text.substr(0, end) + "...";
  }
  return text;
}

}  // namespace xllm::worker
