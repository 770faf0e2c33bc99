/// @file
/// `PythonRuntime`: starts and shuts down the embedded interpreter. Every other part of the bridge needs it started.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "xllm_executor/errors.h"

namespace xllm_executor {

/// Receives Python's log records, warnings and printed lines. `level` is Python's (10 debug, 20 info, 30 warning, 40
/// error). `logger` is the logger's name: "py.warnings" for warnings, "stdout" and "stderr" for printed lines. It is
/// called with the GIL held, on the thread that runs Python. It must not block or call the bridge. If it throws, the
/// record goes to stderr.
using LogSink = std::function<void(int level, std::string_view logger, std::string_view message)>;

/// What a call into the bridge does when the process is exiting, on every thread but the exiting one.
enum class CallsAtExit {
  kThrow,  ///< throws InterpreterEnded; a thread that does not catch it ends the process by std::terminate (SIGABRT)
  kBlock,  ///< blocks until the process has ended; no static destructor may join such a thread
};

/// Options of PythonRuntime::start.
struct PythonOptions {
  /// The python of the environment to run in, such as a virtual environment's bin/python. Empty: the python that the
  /// bridge was configured for.
  std::string executable = {};
  /// Directories inserted at the start of sys.path, in this order.
  std::vector<std::string> module_paths = {};
  /// Receives log records, warnings and printed lines. Empty: they go to stderr, since stdout is the host's.
  LogSink log_sink = {};
  /// kBlock suits a host whose step loop has no handler for InterpreterEnded.
  CallsAtExit calls_at_exit = CallsAtExit::kThrow;
};

/// The interpreter of this process.
class PythonRuntime {
 public:
  /// Starts the interpreter, imports torch and xllm_executor, compares the step contract of both sides, and releases
  /// the GIL. Any thread may call the bridge afterwards. It installs no signal handlers, reads no command line and
  /// changes no locale. Python's output is redirected before code of the environment runs. If the process runs Python
  /// already, it joins that interpreter, whichever thread holds the GIL.
  /// @throws EnvironmentError for a python of another version than the linked libpython, a PYTHONHOME of another
  ///     installation, a torch other than the linked one, another executable than the running interpreter's, a failed
  ///     import, or another contract.
  /// @throws UsageError when it was started before, or in a sub-interpreter.
  static PythonRuntime& start(const PythonOptions& options = {});

  /// The started runtime.
  /// @throws UsageError before start.
  /// @throws InterpreterEnded after shutdown.
  static PythonRuntime& get();

  /// Waits for running calls of other threads, then shuts down every executor (graphs first), destroys the process
  /// groups and drops the models. Later calls throw InterpreterEnded; destructors do nothing. The interpreter is not
  /// finalised, because extension libraries such as torch do not survive that; it ends with the process. The caller may
  /// hold the GIL. During process exit it does nothing. It is optional: without it, exit() waits at most 5 s for running
  /// calls, and the finalisation of a joined interpreter does the same.
  /// @throws UsageError before start, or in a sub-interpreter.
  static void shutdown();

  /// Whether Python may be called: started, not shut down, and the process is not exiting. A thread that has called it,
  /// or any other function of the bridge, may call exit() during another thread's call.
  [[nodiscard]] static bool alive() noexcept;

  /// Path of the interpreter.
  [[nodiscard]] const std::string& executable() const noexcept { return executable_; }
  /// Python's version, such as "3.11.2".
  [[nodiscard]] const std::string& version() const noexcept { return version_; }

  PythonRuntime(const PythonRuntime&) = delete;
  PythonRuntime& operator=(const PythonRuntime&) = delete;

 private:
  PythonRuntime() = default;
  std::string executable_;
  std::string version_;
};

}  // namespace xllm_executor
