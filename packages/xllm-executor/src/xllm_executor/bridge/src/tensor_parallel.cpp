#include "xllm_executor/tensor_parallel.h"

#include <pybind11/pybind11.h>

#include "python_object.h"

namespace xllm_executor {

namespace py = pybind11;

TensorParallelGroup TensorParallelGroup::join(const ParallelArgs& parallel, const GroupOptions& options) {
  return with_gil([&] {
    const py::object name = py::module_::import("xllm_executor.tensor_parallel")
                                .attr("join")(py::arg("rank") = parallel.tp_rank(),
                                              py::arg("size") = parallel.tp_size(),
                                              py::arg("host") = parallel.host(),
                                              py::arg("port") = parallel.port(),
                                              py::arg("prefix") = options.store_prefix,
                                              py::arg("backend") = options.backend,
                                              py::arg("device") = options.device,
                                              py::arg("timeout") = options.timeout_seconds);
    return TensorParallelGroup(name.cast<std::string>());
  });
}

std::string TensorParallelGroup::traffic_json() const {
  return with_gil([]() -> std::string {
    const py::object traffic = py::module_::import("xllm_models.ops").attr("traffic")();
    return py::str(py::module_::import("json").attr("dumps")(traffic));
  });
}

void TensorParallelGroup::leave() {
  with_gil([] { py::module_::import("xllm_executor.tensor_parallel").attr("leave")(); });
}

}  // namespace xllm_executor
