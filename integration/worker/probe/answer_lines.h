// The input loop of a probe: reads one JSON value per line and prints one JSON answer per line.
#pragma once

#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

namespace xllm_worker::probe {

// An exception becomes {"error": message}.
inline int answer_lines(nlohmann::json (*answer)(const nlohmann::json&)) {
  for (std::string line; std::getline(std::cin, line);) {
    nlohmann::json output;
    try {
      output = answer(nlohmann::json::parse(line));
    } catch (const std::exception& error) {
      output = {{"error", error.what()}};
    }
    std::cout << output << std::endl;
  }
  return 0;
}

}  // namespace xllm_worker::probe
