/// @file
/// `StateDict`: the interface through which a model loads weights that the host holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace xllm_executor {

/// Named tensors. The host implements it. It is called from the loading thread, with the GIL held.
class StateDict {
 public:
  virtual ~StateDict() = default;
  [[nodiscard]] virtual bool has(const std::string& name) const = 0;
  /// The tensor, which may be a view of mapped memory: the model copies it. Called once for each name of keys().
  [[nodiscard]] virtual at::Tensor get_tensor(const std::string& name) const = 0;
  [[nodiscard]] virtual std::vector<std::string> keys() const = 0;
};

}  // namespace xllm_executor
