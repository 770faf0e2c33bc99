/// @file
/// The exceptions that the bridge throws. They hold text only, so they may outlive the interpreter.
///
///     std::exception
///       std::logic_error
///         UsageError             a call that the host must not make: its code is wrong
///       std::runtime_error
///         Error
///           EnvironmentError     the environment does not fit this program
///           InterpreterEnded     Python takes no calls any more
///           PythonError          a Python exception
///             RefusedStep        a step was refused for its inputs
///             OutOfMemory        the device or the host has no memory left
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace xllm_executor {

/// A call that the host must not make: before PythonRuntime::start, on a moved-from handle, after the handle's own
/// shutdown, or from a Python sub-interpreter.
class UsageError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Base of all errors that do not come from the host's own code.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// PythonRuntime::start failed: the Python environment is broken or does not fit this program.
class EnvironmentError : public Error {
 public:
  explicit EnvironmentError(const std::string& message, std::string traceback = {})
      : Error(message), traceback_(std::move(traceback)) {}

  /// Python's traceback where an import failed, for a log; otherwise empty.
  [[nodiscard]] const std::string& traceback() const noexcept { return traceback_; }

 private:
  std::string traceback_;
};

/// Python was shut down, the process is exiting, or the process is a fork of the one that started Python.
class InterpreterEnded : public Error {
 public:
  using Error::Error;
};

/// A Python exception. what() is "type: message"; traceback() is separate, for a log.
class PythonError : public Error {
 public:
  PythonError(std::string type, std::string message, std::string traceback)
      : Error(type + ": " + message),
        type_(std::move(type)),
        message_(std::move(message)),
        traceback_(std::move(traceback)) {}

  /// The exception's class, such as "ValueError"; with its module unless it is a builtin.
  [[nodiscard]] const std::string& type() const noexcept { return type_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  /// As Python prints it, the message included; empty when there is none.
  [[nodiscard]] const std::string& traceback() const noexcept { return traceback_; }

 private:
  std::string type_;
  std::string message_;
  std::string traceback_;
};

/// PyExecutor::execute refused a step for its inputs (Python's ValueError or TypeError). The message names the input,
/// its value and the limit. The same step fails again; other steps do not.
class RefusedStep : public PythonError {
 public:
  using PythonError::PythonError;
};

/// The device or the host has no memory left (torch.OutOfMemoryError, MemoryError, or the CPU allocator's error).
class OutOfMemory : public PythonError {
 public:
  using PythonError::PythonError;
};

}  // namespace xllm_executor
