// Parses JSON text from outside: bounded in depth, with duplicate keys as an error. Error messages are short.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace xllm_worker {

class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Deepest nesting of arrays and objects. nlohmann's parser keeps its stack on the heap, but dump() recurses. So a
// deeper value must not exist. A request needs 2 levels, the stats of a rank 5.
inline constexpr size_t kMaxJsonDepth = 16;

inline constexpr size_t kMaxQuoted = 80;  // bytes of a wrong value that a message repeats

// Throws JsonError for invalid JSON, NUL bytes, duplicate keys, and more than kMaxJsonDepth levels. The caller bounds
// the size of the text.
nlohmann::json parse_strict_json(std::string_view text);

// The type of a JSON value for messages: "a string", "an integer", ...
std::string describe_json_type(const nlohmann::json& value);

// The first `max_length` bytes of UTF-8 text, and "..." if there are more. Never cuts a character.
std::string truncate(std::string text, size_t max_length);

// One line of JSON. Invalid UTF-8 becomes U+FFFD. max_length > 0 truncates the text for messages.
std::string dump_json(const nlohmann::json& value, size_t max_length = 0);

}  // namespace xllm_worker
