// Lifecycle scenarios about the process's end, forks, other interpreters and typed errors. Each returns the exit code.
#pragma once

#include <string>

#include "small_host.h"

namespace hosts {

// Ends the process while another thread loads its first model and runs its first steps. `how` is "WAY:MILLISECONDS";
// the ways are return, exit (from main) and thread (exit from a third thread). The exit code is 7.
int exit_in_first_load(const std::string& model_path, const std::string& how);

// Ends the process while another thread is in a call that has made a static object, as libtorch does in calls. The
// object must outlive the call. `way` is as above; the exit code is 7, or 99 when the object was destroyed too early.
int exit_after_a_late_static(const std::string& model_path, const std::string& way);

// Returns 5 while another thread runs steps in a loop without a handler.
int return_while_a_loop_runs(SmallHost& host);

// Forks while another thread runs steps. The child calls the bridge, which prints an error, and exits with code 3.
// Prints the child's exit code and how long it took.
int fork_beside_a_step(SmallHost& host);

// Runs a step in a sub-interpreter, which prints an error, and one after its end.
int call_from_a_sub_interpreter(SmallHost& host);

// Calls moved-from handles and prints their errors.
int moved_from(const std::string& model_path);

// Prints the C++ type of each Python exception that a step raises.
int error_types(const std::string& model_path);

// Starts Python and prints LC_CTYPE, which the host has not set.
int locale_across_start(const std::string& executable);

}  // namespace hosts
