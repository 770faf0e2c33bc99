// Weights that a host holds, as a model loads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace xllm::executor {

// A view of named tensors. Implemented by the host; asked from the thread that loads, with the GIL held.
class StateDict {
 public:
  virtual ~StateDict() = default;
  [[nodiscard]] virtual bool has(const std::string& name) const = 0;
  // The tensor, which may be a view of mapped memory: it is copied into the model. Called for names of keys() only.
  [[nodiscard]] virtual at::Tensor get_tensor(const std::string& name) const = 0;
  [[nodiscard]] virtual std::vector<std::string> keys() const = 0;
};

}  // namespace xllm::executor
