// The process group of the ranks that share one model, as Python's collectives and C++ code (c10d) use it.
#pragma once

#include <string>

#include "xllm/metadata/model_args.h"

namespace xllm::executor {

struct GroupOptions {
  std::string backend = {};  // "gloo", "nccl"; empty: nccl for CUDA devices, gloo for others
  std::string device = "cpu";
  std::string store_prefix = "xllm_tp";  // of the group's keys in the store
  double timeout_seconds = 300;  // that a rank waits for the others, at the start and in each collective
};

// After PythonRuntime::start, before the model executes. Destruction does nothing: call leave once graphs are gone.
class TensorParallelGroup {
 public:
  // Meets the other ranks at the c10d TCPStore that some process serves at parallel.host():port().
  // Throws PythonError when they do not come in time.
  static TensorParallelGroup join(const ParallelArgs& parallel, const GroupOptions& options);

  // The group's name in c10d's registry (c10d::resolve_process_group).
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  // What the Python model's collectives moved, {"all_reduce": [calls, bytes], ...}; bytes of this rank's inputs.
  [[nodiscard]] std::string traffic_json() const;

  void leave();

 private:
  explicit TensorParallelGroup(std::string name) : name_(std::move(name)) {}
  std::string name_;
};

}  // namespace xllm::executor
