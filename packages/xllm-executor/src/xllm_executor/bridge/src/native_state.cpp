#include "xllm_executor/native_state.h"

#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "convert.h"
#include "python_object.h"

namespace xllm_executor {

namespace py = pybind11;

namespace {

AttentionLayer read_layer(const py::handle& layer) {
  return {
      .num_heads = layer["num_heads"].cast<int64_t>(),
      .num_kv_heads = layer["num_kv_heads"].cast<int64_t>(),
      .head_dim = layer["head_dim"].cast<int64_t>(),
      .scale = layer["scale"].cast<double>(),
      .sliding_window = layer["sliding_window"].cast<int64_t>(),
      .logits_soft_cap = layer["logits_soft_cap"].cast<double>(),
  };
}

}  // namespace

NativeState load_native_state(const LoadOptions& options, const ParallelArgs& parallel) {
  return with_gil([&] {
    py::object dtype = py::none();
    if (!options.dtype.empty()) {
      dtype = py::str(options.dtype);
    }
    py::object max_model_len = py::none();
    if (options.max_model_len > 0) {
      max_model_len = py::int_(options.max_model_len);
    }
    const py::object loaded = py::module_::import("xllm_executor.native_state")
                                  .attr("load_state")(options.model_path,
                                                      py::arg("device") = options.device,
                                                      py::arg("dtype") = dtype,
                                                      py::arg("tp_rank") = parallel.tp_rank(),
                                                      py::arg("tp_size") = parallel.tp_size(),
                                                      py::arg("max_model_len") = max_model_len,
                                                      py::arg("progress") = options.progress);
    NativeState state;
    from_python(loaded["args"], "model_args", state.args);
    for (const auto& layer : loaded["layers"]) {
      state.layers.push_back(read_layer(layer));
    }
    state.tensors = loaded["tensors"].cast<std::map<std::string, at::Tensor>>();
    state.dtype = reinterpret_cast<THPDtype*>(py::object(loaded["dtype"]).ptr())->scalar_type;
    state.device = reinterpret_cast<THPDevice*>(py::object(loaded["device"]).ptr())->device;
    return state;
  });
}

std::map<std::string, std::string> checkpoint_digests(const std::string& model_path) {
  return with_gil([&] {
    return py::module_::import("xllm_executor.native_state")
        .attr("checkpoint_digests")(model_path)
        .cast<std::map<std::string, std::string>>();
  });
}

}  // namespace xllm_executor
