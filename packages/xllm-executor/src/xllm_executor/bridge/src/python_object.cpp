#include "python_object.h"

#include <string>

namespace xllm::executor {

namespace py = pybind11;

PythonError to_python_error(const py::error_already_set& error) {
  std::string type = py::str(error.type().attr("__qualname__"));
  const std::string module = py::str(error.type().attr("__module__"));
  if (module != "builtins") {
    type = module + "." + type;
  }
  std::string message;
  std::string traceback;
  try {
    message = py::str(error.value());
    const py::object trace = error.trace() ? error.trace() : py::object(py::none());  // none when raised by C code
    const py::object lines =
        py::module_::import("traceback").attr("format_exception")(error.type(), error.value(), trace);
    traceback = py::str(py::str("").attr("join")(lines));
  } catch (const py::error_already_set& second) {  // an exception whose own __str__ fails
    message += std::string("(its message cannot be had: ") + second.what() + ")";
  }
  return {std::move(type), std::move(message), std::move(traceback)};
}

}  // namespace xllm::executor
