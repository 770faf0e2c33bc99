#include "xllm_executor/python_runtime.h"

#include <dlfcn.h>
#include <pybind11/eval.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <tuple>

#include "child_process.h"
#include "contract.h"
#include "embedded_python.h"
#include "interpreter_state.h"
#include "python_object.h"

namespace xllm_executor {

namespace py = pybind11;

namespace {

std::atomic<PythonRuntime*> g_runtime{nullptr};
std::mutex g_start_mutex;

EnvironmentError cannot_start(const std::string& why) {
  return EnvironmentError("cannot start Python: " + why);
}

struct Interpreter {
  std::string version;      // "3.11"
  std::string base_prefix;  // directory of its installation
};

// Runs the executable, since its version may differ from that of the linked libpython.
Interpreter inspect(const std::string& executable) {
  const std::string code =
      "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.base_prefix)";
  const ChildResult result = run_child({executable, "-I", "-c", code});
  if (result.exit_code != 0) {
    throw cannot_start(executable + " does not run (exit code " + std::to_string(result.exit_code) +
                       "); pass the python of an environment that has xllm-executor");
  }
  const auto newline = result.output.find('\n');
  auto strip = [](std::string text) {
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) {
      text.pop_back();
    }
    return text;
  };
  return {strip(result.output.substr(0, newline)), strip(result.output.substr(newline + 1))};
}

void check_interpreter(const std::string& executable) {
  const Interpreter found = inspect(executable);
  const std::string linked = std::to_string(PY_MAJOR_VERSION) + "." + std::to_string(PY_MINOR_VERSION);
  if (found.version != linked) {
    throw cannot_start(executable + " is Python " + found.version + "; this program is linked with libpython " +
                       linked);
  }
  const char* home = std::getenv("PYTHONHOME");
  if (home != nullptr && *home != '\0') {
    std::error_code error;
    if (!std::filesystem::equivalent(home, found.base_prefix, error)) {
      throw cannot_start(std::string("PYTHONHOME is ") + home + ", but " + executable + " belongs to " +
                         found.base_prefix + "; unset PYTHONHOME");
    }
  }
}

// Extension modules expect libpython's symbols to be global. They are not when the host itself was dlopened.
void make_libpython_global() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&Py_InitializeFromConfig), &info) != 0 && info.dli_fname != nullptr) {
    dlopen(info.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  }
}

// Releases the GIL in its scope if the caller holds it. A thread must not wait for a lock with the GIL held: the owner
// of the lock may need the GIL.
class ReleasedGil {
 public:
  ReleasedGil() : state_(holds_gil() ? PyEval_SaveThread() : nullptr) {}
  ~ReleasedGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// Restores the signal handlers at the end of its scope. Importing Python's signal module replaces the SIGINT handler,
// whatever the configuration says, and signals belong to the host.
class KeepSignals {
 public:
  KeepSignals() {
    for (std::size_t i = 0; i < kNumbers.size(); ++i) {
      sigaction(kNumbers[i], nullptr, &actions_[i]);
    }
  }
  ~KeepSignals() {
    for (std::size_t i = 0; i < kNumbers.size(); ++i) {
      sigaction(kNumbers[i], &actions_[i], nullptr);
    }
  }
  KeepSignals(const KeepSignals&) = delete;
  KeepSignals& operator=(const KeepSignals&) = delete;

 private:
  static constexpr std::array kNumbers = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGCHLD, SIGUSR1, SIGUSR2};
  std::array<struct sigaction, kNumbers.size()> actions_{};
};

// Initialises Python without its site module, which runs code of the environment: output is redirected first. Leaves
// the locale as the host has it.
void initialize(const std::string& executable) {
  PyPreConfig preconfig;
  PyPreConfig_InitPythonConfig(&preconfig);
  preconfig.parse_argv = 0;
  preconfig.configure_locale = 0;
  preconfig.coerce_c_locale = 0;
  PyStatus status = Py_PreInitialize(&preconfig);
  if (PyStatus_Exception(status) != 0) {
    throw cannot_start(status.err_msg != nullptr ? status.err_msg : "unknown error");
  }
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  config.install_signal_handlers = 0;
  config.parse_argv = 0;
  config.site_import = 0;
  status = PyConfig_SetBytesString(&config, &config.executable, executable.c_str());
  if (PyStatus_Exception(status) == 0) {
    status = PyConfig_SetBytesString(&config, &config.program_name, executable.c_str());
  }
  if (PyStatus_Exception(status) == 0) {
    status = Py_InitializeFromConfig(&config);
  }
  PyConfig_Clear(&config);
  if (PyStatus_Exception(status) != 0) {
    throw cannot_start(status.err_msg != nullptr ? status.err_msg : "unknown error");
  }
}

// Refuses a torch other than the linked one: two libtorch in one process corrupt each other silently.
void check_torch() {
  const py::module_ torch = py::module_::import("torch");
  const std::string found = py::str(torch.attr("__version__"));
  const std::string wanted = TORCH_VERSION;
  if (found.substr(0, found.find('+')) != wanted.substr(0, wanted.find('+'))) {
    throw cannot_start("torch in Python is " + found + "; this program was built against " + wanted);
  }
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(linked_torch_symbol()), &info);
  const std::filesystem::path folder =
      std::filesystem::path(std::string(py::str(torch.attr("__file__")))).parent_path() / "lib";
  std::error_code error;
  if (info.dli_fname != nullptr &&
      !std::filesystem::equivalent(std::filesystem::path(info.dli_fname).parent_path(), folder, error)) {
    throw cannot_start("torch in Python has its libraries in " + folder.string() + "; this program runs with " +
                       info.dli_fname);
  }
}

// Checks that a running interpreter is the one that the host asked for. Returns its executable.
std::string check_joined(const std::string& wanted) {
  const std::string running = std::to_string(PY_MAJOR_VERSION) + "." + std::to_string(PY_MINOR_VERSION);
  if (std::string_view(Py_GetVersion()).substr(0, running.size() + 1) != running + ".") {
    throw cannot_start("this process runs Python " + std::string(Py_GetVersion()) + "; this program is built for " +
                       running);
  }
  const std::string executable = py::str(py::module_::import("sys").attr("executable"));
  std::error_code error;
  if (!wanted.empty() && !std::filesystem::equivalent(wanted, executable, error)) {
    throw cannot_start("this process runs Python already, with " + executable + "; " + wanted + " was asked for");
  }
  return executable;
}

// The host's sink as a Python function. An exception of the sink must not fail what Python is doing: it goes to stderr,
// with the record.
py::object python_sink(const LogSink& sink) {
  if (!sink) {
    return py::none();
  }
  return py::cpp_function([sink](int level, const std::string& logger, const std::string& message) {
    std::string error = "an unknown exception";
    try {
      return sink(level, logger, message);
    } catch (const std::exception& exception) {
      error = exception.what();
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
    std::fprintf(stderr, "the log sink threw: %s; the record was: %s: %s\n", error.c_str(), logger.c_str(),
                 message.c_str());
  });
}

// Sends what Python prints to the sink, or to stderr. Runs before code of the environment: site customisation, torch.
void redirect_streams(const py::object& sink) {
  py::dict scope;
  scope["__builtins__"] = py::module_::import("builtins");
  scope["__name__"] = "xllm_executor_streams";
  py::exec(kStreamsSource, scope);
  scope["redirect_streams"](sink);
}

// Runs the site module as Python's own start does, and sets sys.flags.no_site to 0: child processes of Python get the
// flags of their parent.
void run_site() {
  const py::object flags = py::module_::import("sys").attr("flags");
  const py::object names = py::type::of(flags).attr("__match_args__");
  const auto no_site = names.attr("index")("no_site").cast<Py_ssize_t>();
  const auto size = flags.attr("n_fields").cast<Py_ssize_t>();
  const auto copy = py::reinterpret_steal<py::object>(PyStructSequence_New(Py_TYPE(flags.ptr())));
  if (!copy) {
    throw py::error_already_set();
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    const py::object item = i == no_site ? py::int_(0)
                                         : py::reinterpret_borrow<py::object>(PyStructSequence_GetItem(flags.ptr(), i));
    PyStructSequence_SetItem(copy.ptr(), i, item.inc_ref().ptr());
  }
  PySys_SetObject("flags", copy.ptr());
  py::module_::import("site").attr("main")();
}

void import_packages(const PythonOptions& options, const py::object& sink) {
  py::module_::import("signal");  // now: KeepSignals undoes its SIGINT handler
  auto path = py::module_::import("sys").attr("path").cast<py::list>();
  for (std::size_t i = 0; i < options.module_paths.size(); ++i) {
    path.insert(i, options.module_paths[i]);
  }
  check_torch();
  py::module_::import("xllm_metadata").attr("check_contract")(contract_version(), describe_contract());
  py::module_::import("xllm_executor.hosting").attr("redirect_logging")(sink);
}

// Waits for running calls before a joined interpreter is finalised. Finalisation ends a thread that is in Python, or
// that takes the GIL later, in the middle of C++ frames, and that aborts the process.
void stop_before_finalization() {
  const auto wait = [] {
    const py::gil_scoped_release released;
    if (!stop_for_exit()) {
      std::fputs("a call into Python is still running while the interpreter ends: ending the process\n", stderr);
      flush_standard_streams();
      _exit(EXIT_FAILURE);  // the process's own exit code is not known here
    }
  };
  py::module_::import("atexit").attr("register")(py::cpp_function(wait));
}

}  // namespace

PythonRuntime& PythonRuntime::start(const PythonOptions& options) {
  const bool join = Py_IsInitialized() != 0;
  if (join) {
    refuse_sub_interpreter();
  }
  const ReleasedGil released;
  const std::lock_guard lock(g_start_mutex);
  if (g_runtime.load() != nullptr) {
    throw UsageError("Python was started before: one interpreter per process, with " + g_runtime.load()->executable());
  }
  std::string executable = options.executable.empty() ? XLLM_EXECUTOR_PYTHON : options.executable;
  std::optional<KeepSignals> keep_signals;
  if (!join) {
    keep_signals.emplace();
    check_interpreter(executable);
    make_libpython_global();
    initialize(executable);
    PyEval_SaveThread();
  }
  std::string version;
  const py::gil_scoped_acquire gil;
  try {
    const py::object sink = python_sink(options.log_sink);
    redirect_streams(sink);
    if (join) {
      executable = check_joined(options.executable);
    } else {
      run_site();
    }
    import_packages(options, sink);
    stop_before_finalization();
    version = py::str(py::module_::import("platform").attr("python_version")());
  } catch (const py::error_already_set& error) {
    const PythonError translated = to_python_error(error);
    throw EnvironmentError("while starting Python with " + executable + ": " + translated.what(),
                           translated.traceback());
  }
  // Never freed: its destruction would finalise an interpreter that other threads may be in.
  auto* runtime = new PythonRuntime();  // NOLINT(cppcoreguidelines-owning-memory)
  runtime->executable_ = executable;
  runtime->version_ = version;
  g_runtime.store(runtime);
  start_interpreter_state(options.calls_at_exit);
  return *runtime;
}

PythonRuntime& PythonRuntime::get() {
  require_alive();
  return *g_runtime.load();
}

void PythonRuntime::shutdown() {
  if (Py_IsInitialized() != 0) {
    refuse_sub_interpreter();
  }
  const ReleasedGil released;  // the calls that it waits for need the GIL
  const std::lock_guard lock(g_start_mutex);
  if (!stop_interpreter_state()) {
    return;
  }
  keep_thread_state();
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("xllm_executor.hosting").attr("shut_down")();
  } catch (const py::error_already_set& error) {
    throw_python_error(error);
  }
}

bool PythonRuntime::alive() noexcept { return is_alive(); }

}  // namespace xllm_executor
