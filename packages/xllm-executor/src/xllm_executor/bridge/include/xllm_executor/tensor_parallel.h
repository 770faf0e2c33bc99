/// @file
/// `TensorParallelGroup`: the process group of one model's tensor-parallel ranks, for Python's collectives and C++
/// (c10d).
#pragma once

#include <string>

#include "xllm_metadata/model_args.h"

namespace xllm_executor {

using xllm_metadata::ParallelArgs;

/// Options of TensorParallelGroup::join.
struct GroupOptions {
  std::string backend = {};  ///< "gloo", "nccl"; empty: nccl for CUDA devices, gloo for others
  std::string device = "cpu";
  std::string store_prefix = "xllm_tp";  ///< prefix of the group's keys in the store
  double timeout_seconds = 300;  ///< longest wait for other ranks, when joining and in each collective
};

/// Join after PythonRuntime::start and before the model executes. The destructor does nothing: call leave after the
/// graphs are released.
class TensorParallelGroup {
 public:
  /// Joins the other ranks through the c10d TCPStore at parallel.host():port(), which the host serves. Throws
  /// PythonError when a rank does not join within the timeout.
  static TensorParallelGroup join(const ParallelArgs& parallel, const GroupOptions& options);

  /// The group's name in c10d's registry (c10d::resolve_process_group).
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  /// Traffic of the Python model's collectives, {"all_reduce": [calls, bytes], ...}; bytes are those of this rank's
  /// inputs.
  [[nodiscard]] std::string traffic_json() const;

  void leave();

 private:
  explicit TensorParallelGroup(std::string name) : name_(std::move(name)) {}
  std::string name_;
};

}  // namespace xllm_executor
