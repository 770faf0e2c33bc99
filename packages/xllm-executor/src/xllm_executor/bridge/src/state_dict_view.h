// Internal: the Python view of a host's StateDict.
#pragma once

#include <pybind11/pybind11.h>

#include "xllm_executor/state_dict.h"

namespace xllm_executor {

// A Python view of a state dict during one call, with has, get_tensor and keys. After this object is destroyed, a view
// that Python kept raises RuntimeError. Construct and destroy it with the GIL held.
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

}  // namespace xllm_executor
