#include "xllm/executor/causal_lm.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

#include "causal_lm_impl.h"
#include "convert.h"

namespace xllm::executor {

namespace py = pybind11;

namespace {

std::vector<CacheShape> read_cache_shapes(const py::object& model) {
  std::vector<CacheShape> shapes;
  for (const auto& spec : model.attr("attention_specs")) {
    shapes.push_back({spec.attr("num_kv_heads").cast<int64_t>(), spec.attr("head_dim").cast<int64_t>()});
  }
  return shapes;
}

}  // namespace

PyCausalLM::PyCausalLM(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
PyCausalLM::PyCausalLM(PyCausalLM&&) noexcept = default;
PyCausalLM& PyCausalLM::operator=(PyCausalLM&&) noexcept = default;
PyCausalLM::~PyCausalLM() = default;

PyCausalLM PyCausalLM::load(const LoadOptions& options, const ParallelArgs& parallel) {
  return with_gil([&] {
    py::object dtype = py::none();
    if (!options.dtype.empty()) {
      dtype = py::str(options.dtype);
    }
    py::object model = py::module_::import("xllm_models")
                           .attr("load_model")(options.model_path,
                                               py::arg("device") = options.device,
                                               py::arg("dtype") = dtype,
                                               py::arg("tp_rank") = parallel.tp_rank(),
                                               py::arg("tp_size") = parallel.tp_size(),
                                               py::arg("progress") = options.progress);
    auto impl = std::make_unique<Impl>();
    from_python(model.attr("config").attr("to_model_args")(), "model_args", impl->args);
    impl->cache_shapes = read_cache_shapes(model);
    impl->dtype = reinterpret_cast<THPDtype*>(py::object(model.attr("dtype")).ptr())->scalar_type;
    impl->device = reinterpret_cast<THPDevice*>(py::object(model.attr("device")).ptr())->device;
    impl->model = PythonObject(std::move(model));
    return PyCausalLM(std::move(impl));
  });
}

const ModelArgs& PyCausalLM::args() const noexcept { return impl_->args; }
at::ScalarType PyCausalLM::dtype() const noexcept { return impl_->dtype; }
c10::Device PyCausalLM::device() const noexcept { return impl_->device; }
const std::vector<CacheShape>& PyCausalLM::cache_shapes() const noexcept { return impl_->cache_shapes; }

}  // namespace xllm::executor
