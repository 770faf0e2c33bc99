// `PythonError`: a Python exception as text. It holds no Python object, so it may outlive the interpreter.
#pragma once

#include <stdexcept>
#include <string>

namespace xllm_executor {

// A Python exception. what() is "type: message"; traceback() is separate, for a log.
class PythonError : public std::runtime_error {
 public:
  PythonError(std::string type, std::string message, std::string traceback)
      : std::runtime_error(type + ": " + message),
        type_(std::move(type)),
        message_(std::move(message)),
        traceback_(std::move(traceback)) {}

  // The exception's class, such as "ValueError"; with its module unless it is a builtin.
  [[nodiscard]] const std::string& type() const noexcept { return type_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  // As Python prints it, the message included; empty when there is none.
  [[nodiscard]] const std::string& traceback() const noexcept { return traceback_; }

 private:
  std::string type_;
  std::string message_;
  std::string traceback_;
};

}  // namespace xllm_executor
