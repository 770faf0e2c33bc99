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
  for_each_option(config, [&](const char* name, const auto& value) { dict[name] = to_python(value); });
  return dict;
}

Metric read_metric(const py::handle& sample) {
  const auto kind = sample.attr("kind").cast<std::string>();
  return {
      .name = sample.attr("name").cast<std::string>(),
      .kind = kind == "counter" ? MetricKind::kCounter : MetricKind::kGauge,
      .help = sample.attr("help").cast<std::string>(),
      .labels = sample.attr("labels").cast<std::map<std::string, std::string>>(),
      .value = sample.attr("value").cast<double>(),
  };
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
      throw UsageError("the executor was shut down");
    }
    return object.get();
  }
};

PyExecutor::PyExecutor(PyExecutor&&) noexcept = default;
PyExecutor& PyExecutor::operator=(PyExecutor&&) noexcept = default;
PyExecutor::~PyExecutor() = default;

PyExecutor::Impl& PyExecutor::impl() const { return checked_handle(impl_, "PyExecutor"); }

PyExecutor::PyExecutor(const PyCausalLM& model, const Config& config, int64_t max_seqs_per_batch)
    : impl_(std::make_unique<Impl>(model.device())) {
  const c10::DeviceGuard guard(impl_->device);
  with_gil([&] {
    py::object executor = py::module_::import("xllm_executor")
                              .attr("ModelExecutor")(model.impl().model.get(), config_dict(config), max_seqs_per_batch);
    py::module_::import("xllm_executor.hosting").attr("register_executor")(executor);
    impl_->execute = PythonObject(executor.attr("execute"));
    impl_->executor = PythonObject(std::move(executor));
  });
}

void PyExecutor::bind_kv_caches(const std::vector<std::vector<at::Tensor>>& caches) {
  Impl& state = impl();
  const c10::DeviceGuard guard(state.device);
  with_gil([&] {
    py::list layers;
    for (const auto& tensors : caches) {
      py::tuple layer(tensors.size());
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        layer[i] = tensors[i].defined() ? wrap_tensor(tensors[i]) : py::object(py::none());
      }
      layers.append(std::move(layer));
    }
    state.live().attr("bind_kv_caches")(layers);
  });
}

void PyExecutor::warmup() {
  Impl& state = impl();
  const c10::DeviceGuard guard(state.device);
  with_gil([&] { state.live().attr("warmup")(); });
}

StepOutput PyExecutor::execute(const StepInput& input) {
  Impl& state = impl();
  if (!input.tokens.defined() || !input.positions.defined()) {
    const std::string name = input.tokens.defined() ? "positions" : "tokens";
    throw RefusedStep("ValueError", name + " is an undefined tensor; it must be [T] int32", "");
  }
  const auto start = std::chrono::steady_clock::now();
  const c10::DeviceGuard guard(state.device);
  return with_gil(
      [&] {
        PyObject* const method = state.live_execute().ptr();
        const MetadataView view(input.metadata);
        const py::object tokens = wrap_tensor(input.tokens);
        const py::object positions = wrap_tensor(input.positions);
        const py::object indices = wrap_tensor(input.logits_indices);
        const std::array<PyObject*, 4> arguments = {tokens.ptr(), positions.ptr(), view.handle().ptr(), indices.ptr()};
        const auto result = py::reinterpret_steal<py::object>(
            PyObject_Vectorcall(method, arguments.data(), arguments.size(), nullptr));
        if (!result) {
          throw py::error_already_set();
        }
        if (!THPVariable_Check(result.ptr())) {
          throw Error("execute returned " + std::string(py::str(py::type::of(result))) + "; a tensor is needed");
        }
        state.execute_time += std::chrono::steady_clock::now() - start;
        ++state.num_executes;
        StepOutput output;
        (input.logits_indices.has_value() ? output.logits : output.hidden_states) = THPVariable_Unpack(result.ptr());
        return output;
      },
      throw_step_error);
}

std::string PyExecutor::stats_json() const {
  const Impl& state = impl();
  return with_gil([&]() -> std::string {
    return py::str(py::module_::import("json").attr("dumps")(state.live().attr("stats")()));
  });
}

std::vector<Metric> PyExecutor::metrics() const {
  const Impl& state = impl();
  return with_gil([&] {
    std::vector<Metric> samples = {
        {.name = "xllm_executor_execute_calls_total",
         .kind = MetricKind::kCounter,
         .help = "Calls of execute that returned.",
         .labels = {},
         .value = static_cast<double>(state.num_executes)},
        {.name = "xllm_executor_execute_seconds_total",
         .kind = MetricKind::kCounter,
         .help = "Host time spent in these calls.",
         .labels = {},
         .value = std::chrono::duration<double>(state.execute_time).count()},
    };
    const py::object stats = state.live().attr("stats")();
    for (const py::handle sample : py::module_::import("xllm_executor.metrics").attr("metrics")(stats)) {
      samples.push_back(read_metric(sample));
    }
    return samples;
  });
}

void PyExecutor::shutdown() {
  Impl& state = impl();
  if (!state.executor) {
    return;
  }
  const c10::DeviceGuard guard(state.device);
  with_gil([&] { state.live().attr("shutdown")(); });
  state.execute.reset();
  state.executor.reset();
}

}  // namespace xllm_executor
