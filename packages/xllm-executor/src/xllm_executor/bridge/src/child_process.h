// Internal: runs a program and collects its stdout.
#pragma once

#include <string>
#include <vector>

namespace xllm_executor {

struct ChildResult {
  int exit_code = -1;  // 127: the program could not be run
  std::string output;  // stdout
};

// Runs argv[0] with the arguments, waits for it and returns its stdout; stderr is dropped.
[[nodiscard]] ChildResult run_child(const std::vector<std::string>& argv);

}  // namespace xllm_executor
