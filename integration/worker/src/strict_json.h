// Reads JSON text that people write: duplicate keys are errors, messages are plain.
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

// Throws JsonError: not JSON, or an object that has a key twice.
nlohmann::json parse_strict_json(std::string_view text);

// "a string", "an integer", ...: what a JSON value is, for messages.
std::string describe_json_type(const nlohmann::json& value);

// One line of JSON; bytes that are not UTF-8 become U+FFFD. Long values are cut for messages when max_length > 0.
std::string dump_json(const nlohmann::json& value, size_t max_length = 0);

}  // namespace xllm::worker
