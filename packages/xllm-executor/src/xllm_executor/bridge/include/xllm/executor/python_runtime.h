// The embedded interpreter of this process. Owns its start; everything else of the bridge needs it to be started.
#pragma once

#include <string>
#include <vector>

#include "xllm/executor/python_error.h"

namespace xllm::executor {

struct PythonOptions {
  // The python of the environment to run in (a virtual environment's bin/python, say). Empty: the one for which the
  // bridge was configured.
  std::string executable = {};
  // Folders put in front of sys.path, first one first.
  std::vector<std::string> module_paths = {};
};

class PythonRuntime {
 public:
  // Starts the interpreter, imports torch and xllm_executor, compares the step contract of both sides, and releases
  // the GIL, so that any thread may then call the bridge. Installs no signal handlers and reads no command line.
  // Throws std::runtime_error when it was started before, or when the environment does not fit (the python of another
  // version than the linked libpython, a PYTHONHOME that points elsewhere, a torch other than the linked one, a
  // contract mismatch); PythonError when an import fails.
  static PythonRuntime& start(const PythonOptions& options = {});

  // The started runtime. Throws std::runtime_error before start.
  static PythonRuntime& get();

  // Whether Python objects may still be touched: started, and the process is not exiting.
  [[nodiscard]] static bool alive() noexcept;

  [[nodiscard]] const std::string& executable() const noexcept { return executable_; }
  [[nodiscard]] const std::string& version() const noexcept { return version_; }

  PythonRuntime(const PythonRuntime&) = delete;
  PythonRuntime& operator=(const PythonRuntime&) = delete;

 private:
  PythonRuntime() = default;
  std::string executable_;
  std::string version_;
};

}  // namespace xllm::executor
