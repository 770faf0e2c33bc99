// Shows the conversions, the mirror completion and the device of each call to tests: reads one JSON request a line,
// answers with one a line.
//
//   contract_host EXECUTABLE < requests
#include <ATen/ops/empty.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <pybind11/embed.h>
#include <torch/csrc/utils/pybind.h>

#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "convert.h"
#include "xllm_executor/executor.h"
#include "xllm_executor/python_runtime.h"
#include "xllm_metadata/attention_metadata.h"
#include "xllm_metadata/host_mirrors.h"
#include "xllm_metadata/model_args.h"

namespace py = pybind11;

namespace {

struct Inner {
  XLLM_METADATA_REFLECT();
  XLLM_METADATA_PROPERTY(int64_t, count) = 1;
  XLLM_METADATA_PROPERTY(std::vector<std::string>, names);
};

struct Sample {
  XLLM_METADATA_REFLECT();
  XLLM_METADATA_PROPERTY(bool, flag) = false;
  XLLM_METADATA_PROPERTY(int32_t, small) = 0;
  XLLM_METADATA_PROPERTY(double, ratio) = 0.5;
  XLLM_METADATA_PROPERTY(std::string, text);
  XLLM_METADATA_PROPERTY(std::optional<int64_t>, maybe);
  XLLM_METADATA_PROPERTY(Inner, inner);
  XLLM_METADATA_PROPERTY(std::vector<Inner>, inners);
};

struct NotReflected {
  XLLM_METADATA_PROPERTY(int, value) = 3;
};
static_assert(!xllm_metadata::Reflected<NotReflected>);

template <class T>
py::object round_trip(const py::object& value) {
  T target;
  xllm_executor::from_python(value, "args", target);
  return xllm_executor::to_python(target);
}

at::Tensor tensor(const py::object& values) {
  return py::module_::import("torch").attr("tensor")(values, py::arg("dtype") = py::module_::import("torch").attr("int32"))
      .cast<at::Tensor>();
}

// Completes the mirrors of a request's fields and returns what the metadata then holds.
py::object complete(const py::dict& request) {
  xllm_metadata::AttentionMetadata metadata;
  xllm_metadata::for_each_property(metadata, [&]<class T>(std::string_view name, T& member) {
    const py::str key(name.data(), name.size());
    if (!request.contains(key)) {
      return;
    }
    if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>) {
      member = tensor(request[key]);
    } else {
      member = request[key].template cast<T>();
    }
  });
  xllm_metadata::complete_host_mirrors(metadata, request["page_size"].cast<int64_t>());
  py::dict answer;
  xllm_metadata::for_each_property(metadata, [&]<class T>(std::string_view name, const T& member) {
    py::object value = py::none();
    if constexpr (std::is_same_v<T, at::Tensor>) {
      if (member.defined()) {
        value = py::cast(member).attr("tolist")();
      }
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      if (member.has_value()) {
        value = py::cast(*member).attr("tolist")();
      }
    } else {
      value = py::cast(member);
    }
    answer[py::str(name.data(), name.size())] = value;
  });
  return answer;
}

using Devices = c10::impl::FakeGuardImpl<c10::DeviceType::PrivateUse1>;  // eight, each with a number and nothing else
C10_REGISTER_GUARD_IMPL(PrivateUse1, Devices)

// A model and an executor that note which device is current in each call.
constexpr const char* kNoting = R"(
import torch
import xllm_executor
import xllm_models

class Config:
    def to_model_args(self):
        return {"model_type": "noting"}

class Model:
    config = Config()
    cache_specs = []
    dtype = torch.float32

    def __init__(self, args, *, device, tp=None):
        self.device = torch.device(device)

    def eval(self):
        return self

    def load_weights(self, state_dicts, tp_rank, tp_size):
        note("load_weights")

    def compute_logits(self, hidden, indices):
        note("logits")
        return hidden

class ModelExecutor:
    def __init__(self, model, config, max_seqs_per_batch):
        note("executor")

    def bind_kv_caches(self, caches):
        note("bind_kv_caches")

    def warmup(self):
        note("warmup")

    def execute(self, tokens, positions, metadata, logits_indices=None):
        note("execute")
        return tokens

    def shutdown(self):
        note("shutdown")

xllm_models.load_model = lambda path, **options: Model({}, device=options["device"])
xllm_models.get_model_class = lambda name: Model
xllm_executor.ModelExecutor = ModelExecutor
)";

// For a model on device 2, while device 1 is current here: which device is current in each call, and here afterwards.
py::object current_devices() {
  using xllm_executor::PyCausalLM;
  py::dict devices;
  py::dict globals;
  globals["__builtins__"] = py::module_::import("builtins");
  globals["note"] = py::cpp_function(
      [devices](const std::string& call) { devices[py::str(call)] = Devices::getDeviceIndex(); });
  py::exec(kNoting, globals);
  Devices::setDeviceIndex(1);
  const PyCausalLM model = PyCausalLM::load({.model_path = "none", .device = "privateuseone:2"});
  PyCausalLM::create({}, {}, "privateuseone:2").load_weights({});
  xllm_executor::PyExecutor executor(model, {}, 1);
  executor.bind_kv_caches({});
  executor.warmup();
  const at::Tensor any = at::empty({1}, at::kInt);
  (void)executor.execute({any, any, {}, std::nullopt});
  (void)model.logits(any, std::nullopt);
  executor.shutdown();
  devices["here"] = Devices::getDeviceIndex();
  return devices;
}

py::object config_defaults() {
  py::dict defaults;
  const xllm_executor::Config config;
  xllm_executor::for_each_option(config, [&](const char* name, const auto& value) { defaults[name] = py::cast(value); });
  return defaults;
}

py::object answer(const py::dict& request) {
  const auto call = request["call"].cast<std::string>();
  if (call == "config") {
    return config_defaults();
  }
  if (call == "model_args") {
    return round_trip<xllm_metadata::ModelArgs>(request["value"]);
  }
  if (call == "parallel_args") {
    return round_trip<xllm_metadata::ParallelArgs>(request["value"]);
  }
  if (call == "sample") {
    return round_trip<Sample>(request["value"]);
  }
  if (call == "devices") {
    return current_devices();
  }
  return complete(request["value"].cast<py::dict>());
}

}  // namespace

int main(int argc, char** argv) {
  xllm_executor::PythonRuntime::start({.executable = argc > 1 ? argv[1] : ""});
  const py::gil_scoped_acquire gil;
  const py::module_ json = py::module_::import("json");
  for (std::string line; std::getline(std::cin, line);) {
    py::dict result;
    try {
      result["value"] = answer(json.attr("loads")(line).cast<py::dict>());
    } catch (const std::invalid_argument& error) {
      result["error"] = error.what();
    }
    std::cout << json.attr("dumps")(result).cast<std::string>() << std::endl;
  }
  std::cout.flush();
  return 0;
}
