// Parses JSON text strictly: a duplicate key is an error. Error messages are short.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace xllm::worker {

class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws JsonError for invalid JSON and for duplicate keys.
nlohmann::json parse_strict_json(std::string_view text);

// The type of a JSON value for messages: "a string", "an integer", ...
std::string describe_json_type(const nlohmann::json& value);

// One line of JSON. Invalid UTF-8 becomes U+FFFD. max_length > 0 truncates the text for messages.
std::string dump_json(const nlohmann::json& value, size_t max_length = 0);

}  // namespace xllm::worker
