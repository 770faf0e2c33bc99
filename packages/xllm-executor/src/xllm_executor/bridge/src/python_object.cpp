#include "python_object.h"

#include <unistd.h>

#include <string>

namespace xllm_executor {

namespace py = pybind11;

namespace {

// One PyGILState_Ensure per thread without its release. Later releases are then never the last one, which would destroy
// the thread state.
class KeptThreadState {
 public:
  KeptThreadState() {
    // A thread that has a state already, such as Python's own threads, keeps that one. Its owner destroys it before
    // this destructor runs.
    if (PyGILState_GetThisThreadState() == nullptr) {
      gil_ = PyGILState_Ensure();
      state_ = PyEval_SaveThread();
    }
  }
  ~KeptThreadState() {
    // The main thread ends at process exit, possibly while another thread is in a step. It must not wait for the GIL
    // then.
    if (state_ == nullptr || gettid() == getpid()) {
      return;
    }
    if (const ActiveCleanup cleanup; cleanup) {
      PyEval_RestoreThread(state_);
      PyGILState_Release(gil_);
    }
  }
  KeptThreadState(const KeptThreadState&) = delete;
  KeptThreadState& operator=(const KeptThreadState&) = delete;

 private:
  PyGILState_STATE gil_ = PyGILState_UNLOCKED;
  PyThreadState* state_ = nullptr;
};

}  // namespace

void keep_thread_state() {
  thread_local const KeptThreadState kept;
  (void)kept;
}

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
    const py::object trace = error.trace() ? error.trace() : py::object(py::none());  // absent when C code raised it
    const py::object lines =
        py::module_::import("traceback").attr("format_exception")(error.type(), error.value(), trace);
    traceback = py::str(py::str("").attr("join")(lines));
  } catch (const py::error_already_set& second) {  // an exception whose own __str__ fails
    message += std::string("(its message failed: ") + second.what() + ")";
  }
  return {std::move(type), std::move(message), std::move(traceback)};
}

namespace {

bool is_out_of_memory(const py::error_already_set& error, const PythonError& text) {
  if (error.matches(PyExc_MemoryError)) {
    return true;
  }
  // torch's CPU allocator raises a plain RuntimeError.
  if (text.message().find("DefaultCPUAllocator: can't allocate memory") != std::string::npos) {
    return true;
  }
  const py::dict modules = py::module_::import("sys").attr("modules");
  return modules.contains("torch") && error.matches(modules["torch"].attr("OutOfMemoryError"));
}

}  // namespace

void throw_python_error(const py::error_already_set& error) {
  PythonError text = to_python_error(error);
  if (is_out_of_memory(error, text)) {
    throw OutOfMemory(text.type(), text.message(), text.traceback());
  }
  throw text;
}

void throw_step_error(const py::error_already_set& error) {
  if (error.matches(PyExc_ValueError) || error.matches(PyExc_TypeError)) {
    const PythonError text = to_python_error(error);
    throw RefusedStep(text.type(), text.message(), text.traceback());
  }
  throw_python_error(error);
}

}  // namespace xllm_executor
