#include "xllm_executor/executor.h"

#include <c10/core/DeviceGuard.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <chrono>

#include "causal_lm_impl.h"
#include "convert.h"
#include "metadata_view.h"
#include "python_object.h"

namespace xllm_executor {

namespace py = pybind11;

namespace {

py::object wrap_tensor(const at::Tensor& tensor) {
  PyObject* object = THPVariable_Wrap(tensor);
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(object);
}

py::object wrap_tensor(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? wrap_tensor(*tensor) : py::object(py::none());
}

py::dict config_dict(const Config& config) {
  py::dict dict;
  for (const auto& [key, value] : config) {
    dict[py::str(key)] = std::visit([](const auto& item) { return to_python(item); }, value);
  }
  return dict;
}

}  // namespace

struct PyExecutor::Impl {
  explicit Impl(c10::Device on) : device(on) {}

  // The model's device. Kernels launch on the thread's current device, which a host need not set on every thread.
  c10::Device device;
  PythonObject executor;
  PythonObject execute;  // the bound method, looked up once
  // Guarded by the GIL, since other threads read metrics during a step.
  int64_t num_executes = 0;
  std::chrono::steady_clock::duration execute_time{};

  // These throw after shutdown.
  [[nodiscard]] const py::object& live() const { return checked(executor); }
  [[nodiscard]] const py::object& live_execute() const { return checked(execute); }

 private:
  static const py::object& checked(const PythonObject& object) {
    if (!object) {
      throw std::runtime_error("the executor was shut down");
    }
    return object.get();
  }
};

PyExecutor::PyExecutor(PyExecutor&&) noexcept = default;
PyExecutor& PyExecutor::operator=(PyExecutor&&) noexcept = default;
PyExecutor::~PyExecutor() = default;

PyExecutor::PyExecutor(const PyCausalLM& model, const Config& config, int64_t max_seqs_per_batch)
    : impl_(std::make_unique<Impl>(model.device())) {
  const c10::DeviceGuard guard(impl_->device);
  with_gil([&] {
    py::object executor = py::module_::import("xllm_executor")
                              .attr("ModelExecutor")(model.impl_->model.get(), config_dict(config), max_seqs_per_batch);
    py::module_::import("xllm_executor.hosting").attr("register_executor")(executor);
    impl_->execute = PythonObject(executor.attr("execute"));
    impl_->executor = PythonObject(std::move(executor));
  });
}

void PyExecutor::bind_kv_caches(const std::vector<std::vector<at::Tensor>>& caches) {
  const c10::DeviceGuard guard(impl_->device);
  with_gil([&] {
    py::list layers;
    for (const auto& tensors : caches) {
      py::tuple layer(tensors.size());
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        layer[i] = tensors[i].defined() ? wrap_tensor(tensors[i]) : py::object(py::none());
      }
      layers.append(std::move(layer));
    }
    impl_->live().attr("bind_kv_caches")(layers);
  });
}

void PyExecutor::warmup() {
  const c10::DeviceGuard guard(impl_->device);
  with_gil([&] { impl_->live().attr("warmup")(); });
}

at::Tensor PyExecutor::execute(const at::Tensor& tokens,
                               const at::Tensor& positions,
                               const AttentionMetadata& metadata,
                               const std::optional<at::Tensor>& logits_indices) {
  const auto start = std::chrono::steady_clock::now();
  const c10::DeviceGuard guard(impl_->device);
  return with_gil([&] {
    PyObject* const method = impl_->live_execute().ptr();
    const MetadataView view(metadata);
    const py::object py_tokens = wrap_tensor(tokens);
    const py::object py_positions = wrap_tensor(positions);
    const py::object py_indices = wrap_tensor(logits_indices);
    const std::array<PyObject*, 4> arguments = {py_tokens.ptr(), py_positions.ptr(), view.handle().ptr(),
                                                py_indices.ptr()};
    const auto result = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(method, arguments.data(), arguments.size(), nullptr));
    if (!result) {
      throw py::error_already_set();
    }
    if (!THPVariable_Check(result.ptr())) {
      throw std::runtime_error("execute returned " + std::string(py::str(py::type::of(result))) + "; a tensor is needed");
    }
    impl_->execute_time += std::chrono::steady_clock::now() - start;
    ++impl_->num_executes;
    return at::Tensor(THPVariable_Unpack(result.ptr()));
  });
}

std::string PyExecutor::stats_json() const {
  return with_gil([&]() -> std::string {
    return py::str(py::module_::import("json").attr("dumps")(impl_->live().attr("stats")()));
  });
}

std::map<std::string, double> PyExecutor::metrics() const {
  return with_gil([&] {
    const py::object stats = impl_->live().attr("stats")();
    auto numbers =
        py::module_::import("xllm_executor.hosting").attr("metrics")(stats).cast<std::map<std::string, double>>();
    numbers["time.executes"] = static_cast<double>(impl_->num_executes);
    numbers["time.execute_seconds"] = std::chrono::duration<double>(impl_->execute_time).count();
    return numbers;
  });
}

void PyExecutor::shutdown() {
  if (!impl_->executor) {
    return;
  }
  const c10::DeviceGuard guard(impl_->device);
  with_gil([&] { impl_->live().attr("shutdown")(); });
  impl_->execute.reset();
  impl_->executor.reset();
}

}  // namespace xllm_executor
