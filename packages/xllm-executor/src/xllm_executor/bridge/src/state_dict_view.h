// Internal: the Python object through which a model reads a host's weights.
#pragma once

#include <pybind11/pybind11.h>

#include "xllm/executor/state_dict.h"

namespace xllm::executor {

// A view of a state dict for the time of one call, with has, get_tensor and keys. When it ends, an object that Python kept
// raises RuntimeError. Construct and destroy with the GIL held.
class StateDictView {
 public:
  explicit StateDictView(const StateDict& state_dict);
  ~StateDictView();
  StateDictView(StateDictView&&) noexcept = default;
  StateDictView& operator=(StateDictView&&) = delete;

  [[nodiscard]] const pybind11::object& object() const noexcept { return object_; }

 private:
  pybind11::object object_;
};

}  // namespace xllm::executor
