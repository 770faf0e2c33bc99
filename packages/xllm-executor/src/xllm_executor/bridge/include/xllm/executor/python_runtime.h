// The embedded interpreter of this process. Owns its start; everything else of the bridge needs it to be started.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "xllm/executor/python_error.h"

namespace xllm::executor {

// Receives what Python logs and warns of, and what it prints. `level` is Python's (10 debug, 20 info, 30 warning, 40 error),
// `logger` the logger's name ("py.warnings" for warnings, "stdout" and "stderr" for printed lines). Called with the GIL
// held, on whichever thread runs Python: it must neither block nor call the bridge. It must not throw.
using LogSink = std::function<void(int level, std::string_view logger, std::string_view message)>;

struct PythonOptions {
  // The python of the environment to run in (a virtual environment's bin/python, say). Empty: the one for which the
  // bridge was configured.
  std::string executable = {};
  // Folders put in front of sys.path, first one first.
  std::vector<std::string> module_paths = {};
  // Where Python's log records, warnings and printed lines go. Empty: all of them to stderr; stdout is the host's.
  LogSink log_sink = {};
};

class PythonRuntime {
 public:
  // Starts the interpreter, imports torch and xllm_executor, compares the step contract of both sides, and releases
  // the GIL, so that any thread may then call the bridge. Installs no signal handlers and reads no command line. In a
  // process that runs Python already it joins that interpreter instead, whichever thread holds the GIL.
  // Throws std::runtime_error when it was started before, or when the environment does not fit (the python of another
  // version than the linked libpython, a PYTHONHOME that points elsewhere, a torch other than the linked one, another
  // executable than that of the interpreter to join); PythonError when an import fails or the step contract differs.
  static PythonRuntime& start(const PythonOptions& options = {});

  // The started runtime. Throws std::runtime_error before start and after shutdown.
  static PythonRuntime& get();

  // Ends the use of Python by this process: waits for calls that other threads are in, shuts every executor down (their
  // graphs go first), then the process groups, then drops models. Later calls throw std::runtime_error; destructors
  // do nothing. The interpreter itself is not finalised, since libraries in it do not survive that; it ends with the
  // process. The caller may hold the GIL. While the process exits it does nothing. Optional: without it, exit() waits for
  // running calls (5 s at most) and leaves the rest to the system; so does the finalisation of an interpreter that was
  // joined.
  static void shutdown();

  // Whether Python objects may still be touched: started, not shut down, and the process is not exiting.
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
