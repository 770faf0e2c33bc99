// The option table: name, type, limits and help text of each option. Parses option values from text and JSON.
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "options.h"

namespace xllm_worker {

struct Option {
  using Member = std::variant<std::string WorkerOptions::*,
                              bool WorkerOptions::*,
                              int64_t WorkerOptions::*,
                              std::optional<int64_t> WorkerOptions::*,
                              std::optional<ByteSize> WorkerOptions::*>;

  std::string_view name;
  Member member;
  std::string_view help;
  std::string_view unset = "";  // --help's text for the default, when the member has none
  int64_t min = 0;
  int64_t max = std::numeric_limits<int64_t>::max();
  std::vector<std::string_view> choices = {};
  bool only_on_command_line = false;

  bool is_bool() const { return std::holds_alternative<bool WorkerOptions::*>(member); }

  std::string expected() const;  // "an integer from 1 to 1024"
  std::string default_text() const;

  // Throws OptionError naming the flag, the value and what was expected.
  void set_from_text(WorkerOptions& options, const std::string& text) const;
};

const std::vector<Option>& option_table();
const Option* find_option(std::string_view name);

// Sets every option that the JSON object in the file names and that is not in `given`. Throws OptionError.
void read_config_file(const std::string& path, const std::set<std::string>& given, WorkerOptions& options);

}  // namespace xllm_worker
