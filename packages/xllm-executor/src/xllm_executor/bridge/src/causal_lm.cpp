#include "xllm_executor/causal_lm.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "causal_lm_impl.h"
#include "convert.h"
#include "state_dict_view.h"

namespace xllm_executor {

namespace py = pybind11;

namespace {

at::ScalarType scalar_type(const py::object& dtype) { return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type; }

CacheKind cache_kind(const std::string& name) {
  if (name == "paged") return CacheKind::kPaged;
  if (name == "state") return CacheKind::kState;
  throw py::value_error("a cache of kind '" + name + "', which this bridge does not know");
}

std::vector<std::vector<CacheSpec>> read_cache_specs(const py::object& model) {
  std::vector<std::vector<CacheSpec>> layers;
  for (const auto& layer : model.attr("cache_specs")) {
    std::vector<CacheSpec>& specs = layers.emplace_back();
    for (const auto& spec : layer) {
      specs.push_back({.name = spec.attr("name").cast<std::string>(),
                       .kind = cache_kind(spec.attr("kind").attr("value").cast<std::string>()),
                       .shape = spec.attr("shape").cast<std::vector<int64_t>>(),
                       .dtype = scalar_type(spec.attr("dtype")),
                       .group = spec.attr("group").cast<int64_t>(),
                       .window = spec.attr("window").cast<int64_t>()});
    }
  }
  return layers;
}

}  // namespace

std::vector<int64_t> CacheSpec::tensor_shape(const CacheSizes& sizes) const {
  std::vector<int64_t> result = {sizes.num_slots};
  if (kind == CacheKind::kPaged) {
    const bool own = group > 0 && !sizes.group_num_pages.empty();
    result = {own ? sizes.group_num_pages.at(static_cast<std::size_t>(group - 1)) : sizes.num_pages, sizes.page_size};
  }
  result.insert(result.end(), shape.begin(), shape.end());
  return result;
}

int64_t CacheSpec::bytes_per_entry() const {
  auto bytes = static_cast<int64_t>(at::elementSize(dtype));
  for (const int64_t dimension : shape) bytes *= dimension;
  return bytes;
}

std::unique_ptr<PyCausalLM::Impl> PyCausalLM::Impl::make(py::object model, const ParallelArgs& parallel) {
  auto impl = std::make_unique<Impl>();
  from_python(model.attr("config").attr("to_model_args")(), "model_args", impl->args);
  impl->parallel = parallel;
  impl->cache_specs = read_cache_specs(model);
  impl->dtype = scalar_type(model.attr("dtype"));
  impl->device = reinterpret_cast<THPDevice*>(py::object(model.attr("device")).ptr())->device;
  impl->model = PythonObject(std::move(model));
  return impl;
}

PyCausalLM::PyCausalLM(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
PyCausalLM::PyCausalLM(PyCausalLM&&) noexcept = default;
PyCausalLM& PyCausalLM::operator=(PyCausalLM&&) noexcept = default;
PyCausalLM::~PyCausalLM() = default;

PyCausalLM::Impl& PyCausalLM::impl() const { return checked_handle(impl_, "PyCausalLM"); }

PyCausalLM PyCausalLM::create(const ModelArgs& args, const ParallelArgs& parallel, const std::string& device) {
  return with_gil([&] {
    const py::module_ models = py::module_::import("xllm_models");
    const std::string& name =
        args.architectures().has_value() && !args.architectures()->empty() ? args.architectures()->front()
                                                                           : args.model_type();
    const py::object tp =
        models.attr("TensorParallel")(py::arg("rank") = parallel.tp_rank(), py::arg("size") = parallel.tp_size());
    py::object model =
        models.attr("get_model_class")(name)(to_python(args), py::arg("device") = device, py::arg("tp") = tp);
    return PyCausalLM(Impl::make(model.attr("eval")(), parallel));
  });
}

void PyCausalLM::load_weights(const std::vector<const StateDict*>& state_dicts) {
  const c10::DeviceGuard guard(impl().device);
  with_gil([&] {
    std::vector<StateDictView> views;
    views.reserve(state_dicts.size());
    for (const StateDict* state_dict : state_dicts) {
      views.emplace_back(*state_dict);
    }
    py::list list;
    for (const StateDictView& view : views) {
      list.append(view.object());
    }
    impl().model.get().attr("load_weights")(list, impl().parallel.tp_rank(), impl().parallel.tp_size());
  });
}

at::Tensor PyCausalLM::logits(const at::Tensor& hidden, const std::optional<at::Tensor>& logits_indices) const {
  const c10::DeviceGuard guard(impl().device);
  return with_gil([&] {
    const c10::NoGradGuard no_grad;
    const py::object indices = logits_indices.has_value() ? py::cast(*logits_indices) : py::object(py::none());
    return impl().model.get().attr("compute_logits")(hidden, indices).cast<at::Tensor>();
  });
}

PyCausalLM PyCausalLM::load(const LoadOptions& options, const ParallelArgs& parallel) {
  return with_gil([&] {
    py::object dtype = py::none();
    if (!options.dtype.empty()) {
      dtype = py::str(options.dtype);
    }
    py::object max_model_len = py::none();
    if (options.max_model_len > 0) {
      max_model_len = py::int_(options.max_model_len);
    }
    py::object model = py::module_::import("xllm_models")
                           .attr("load_model")(options.model_path,
                                               py::arg("device") = options.device,
                                               py::arg("dtype") = dtype,
                                               py::arg("tp_rank") = parallel.tp_rank(),
                                               py::arg("tp_size") = parallel.tp_size(),
                                               py::arg("max_model_len") = max_model_len,
                                               py::arg("kv_cache_dtype") = options.kv_cache_dtype,
                                               py::arg("progress") = options.progress);
    return PyCausalLM(Impl::make(std::move(model), parallel));
  });
}

const ModelArgs& PyCausalLM::args() const { return impl().args; }
at::ScalarType PyCausalLM::dtype() const { return impl().dtype; }
c10::Device PyCausalLM::device() const { return impl().device; }
const std::vector<std::vector<CacheSpec>>& PyCausalLM::cache_specs() const { return impl().cache_specs; }

}  // namespace xllm_executor
