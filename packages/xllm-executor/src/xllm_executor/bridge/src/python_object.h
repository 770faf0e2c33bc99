// Internal: a Python reference that any thread may drop, and the translation of Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "life.h"
#include "xllm/executor/python_error.h"
#include "xllm/executor/python_runtime.h"

namespace xllm::executor {

// An owned reference whose destructor takes the GIL itself, and leaks the object when the process is past Python.
class PythonObject {
 public:
  PythonObject() = default;
  explicit PythonObject(pybind11::object object) noexcept : object_(std::move(object)) {}  // with the GIL held
  PythonObject(PythonObject&& other) noexcept : object_(std::exchange(other.object_, pybind11::object())) {}
  PythonObject& operator=(PythonObject&& other) noexcept {
    if (this != &other) {
      reset();
      object_ = std::exchange(other.object_, pybind11::object());
    }
    return *this;
  }
  ~PythonObject() { reset(); }

  [[nodiscard]] const pybind11::object& get() const noexcept { return object_; }
  explicit operator bool() const noexcept { return object_.ptr() != nullptr; }

  void reset() noexcept {
    if (object_.ptr() == nullptr) {
      return;
    }
    if (const ActiveCleanup cleanup; cleanup) {
      const pybind11::gil_scoped_acquire gil;
      object_ = pybind11::object();
    } else {
      object_.release();
    }
  }

 private:
  pybind11::object object_;
};

// The exception as text. With the GIL held.
[[nodiscard]] PythonError to_python_error(const pybind11::error_already_set& error);

// Makes Python keep this thread's state between calls: without it, each call from a thread that Python did not create
// would make a state and destroy it again. Whether the thread holds the GIL is the same afterwards.
void keep_thread_state();

// Runs the callable with the GIL held; a Python exception becomes a PythonError.
template <class Callable>
auto with_gil(Callable&& callable) {
  const ActiveCall call;
  keep_thread_state();
  const pybind11::gil_scoped_acquire gil;
  try {
    return callable();
  } catch (const pybind11::error_already_set& error) {
    throw to_python_error(error);
  }
}

}  // namespace xllm::executor
