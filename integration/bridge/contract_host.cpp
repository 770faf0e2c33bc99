// Shows the conversions and the mirror completion to tests: reads one JSON request a line, answers with one a line.
//
//   contract_host EXECUTABLE < requests
#include <pybind11/embed.h>
#include <torch/csrc/utils/pybind.h>

#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "convert.h"
#include "xllm/executor/python_runtime.h"
#include "xllm/metadata/attention_metadata.h"
#include "xllm/metadata/host_mirrors.h"
#include "xllm/metadata/model_args.h"

namespace py = pybind11;

namespace {

struct Inner {
  REFLECT_PROPERTIES();
  PROPERTY(int64_t, count) = 1;
  PROPERTY(std::vector<std::string>, names);
};

struct Sample {
  REFLECT_PROPERTIES();
  PROPERTY(bool, flag) = false;
  PROPERTY(int32_t, small) = 0;
  PROPERTY(double, ratio) = 0.5;
  PROPERTY(std::string, text);
  PROPERTY(std::optional<int64_t>, maybe);
  PROPERTY(Inner, inner);
  PROPERTY(std::vector<Inner>, inners);
};

struct NotReflected {
  PROPERTY(int, value) = 3;
};
static_assert(!xllm::Reflected<NotReflected>);

template <class T>
py::object round_trip(const py::object& value) {
  T target;
  xllm::executor::from_python(value, "args", target);
  return xllm::executor::to_python(target);
}

at::Tensor tensor(const py::object& values) {
  return py::module_::import("torch").attr("tensor")(values, py::arg("dtype") = py::module_::import("torch").attr("int32"))
      .cast<at::Tensor>();
}

// Completes the mirrors of a request's fields and returns what the metadata then holds.
py::object complete(const py::dict& request) {
  xllm::AttentionMetadata metadata;
  xllm::for_each_property(metadata, [&]<class T>(std::string_view name, T& member) {
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
  xllm::complete_host_mirrors(metadata, request["page_size"].cast<int64_t>());
  py::dict answer;
  xllm::for_each_property(metadata, [&]<class T>(std::string_view name, const T& member) {
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

py::object answer(const py::dict& request) {
  const auto call = request["call"].cast<std::string>();
  if (call == "model_args") {
    return round_trip<xllm::ModelArgs>(request["value"]);
  }
  if (call == "parallel_args") {
    return round_trip<xllm::ParallelArgs>(request["value"]);
  }
  if (call == "sample") {
    return round_trip<Sample>(request["value"]);
  }
  return complete(request["value"].cast<py::dict>());
}

}  // namespace

int main(int argc, char** argv) {
  xllm::executor::PythonRuntime::start({.executable = argc > 1 ? argv[1] : ""});
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
