// Internal: a Python reference that any thread may release, and the translation of Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "interpreter_state.h"
#include "xllm_executor/errors.h"
#include "xllm_executor/python_runtime.h"

namespace xllm_executor {

// An owned reference. Its destructor takes the GIL, and leaks the object when Python may no longer be called.
class PythonObject {
 public:
  PythonObject() = default;
  explicit PythonObject(pybind11::object object) noexcept : object_(std::move(object)) {}  // needs the GIL
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

// The exception as text. Needs the GIL.
[[nodiscard]] PythonError to_python_error(const pybind11::error_already_set& error);

// Throws the exception as a PythonError, or as OutOfMemory where it says that memory is exhausted. Needs the GIL.
[[noreturn]] void throw_python_error(const pybind11::error_already_set& error);

// As throw_python_error, for a step: ValueError and TypeError become RefusedStep.
[[noreturn]] void throw_step_error(const pybind11::error_already_set& error);

// Keeps this thread's Python state between calls. Without it, each call from a thread that Python did not create would
// allocate a state and destroy it. Does not change whether the thread holds the GIL.
void keep_thread_state();

// Runs the callable with the GIL held, and turns a Python exception into a PythonError by the given function.
template <class Callable>
auto with_gil(Callable&& callable, void (*translate)(const pybind11::error_already_set&) = throw_python_error) {
  const ActiveCall call;
  keep_thread_state();
  const pybind11::gil_scoped_acquire gil;
  try {
    return callable();
  } catch (const pybind11::error_already_set& error) {
    translate(error);
    throw;  // not reached: translate throws
  }
}

// The state of a handle of a class named `type`. Throws UsageError when the handle was moved from.
template <class Impl>
Impl& checked_handle(const std::unique_ptr<Impl>& impl, const char* type) {
  if (impl == nullptr) {
    throw UsageError(std::string("this ") + type + " was moved from: use the handle that it was moved to");
  }
  return *impl;
}

}  // namespace xllm_executor
