#include "state_dict_view.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace xllm_executor {

namespace py = pybind11;

namespace {

class Access {
 public:
  explicit Access(const StateDict* state_dict) : state_dict_(state_dict) {}

  [[nodiscard]] const StateDict& get() const {
    if (state_dict_ == nullptr) {
      throw std::runtime_error("a state dict was read after load_weights: it belongs to the C++ side");
    }
    return *state_dict_;
  }

  void end() noexcept { state_dict_ = nullptr; }

 private:
  const StateDict* state_dict_;
};

py::object make_object(const StateDict& state_dict) {
  // Registered once, never freed.
  static const py::object* const kClass = [] {
    const py::object scope = py::module_::import("types").attr("ModuleType")("xllm_executor_bridge");
    auto access = py::class_<Access>(scope, "StateDict", py::module_local());
    access.def("has", [](const Access& self, const std::string& name) { return self.get().has(name); })
        .def("get_tensor", [](const Access& self, const std::string& name) { return self.get().get_tensor(name); })
        .def("keys", [](const Access& self) { return self.get().keys(); });
    return new py::object(std::move(access));
  }();
  (void)kClass;
  return py::cast(Access(&state_dict));
}

}  // namespace

StateDictView::StateDictView(const StateDict& state_dict) : object_(make_object(state_dict)) {}

StateDictView::~StateDictView() {
  if (object_) {  // not moved from
    object_.cast<Access&>().end();
  }
}

}  // namespace xllm_executor
