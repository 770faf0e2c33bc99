// Lifecycle scenarios with several threads. Each returns the exit code.
#pragma once

#include <functional>
#include <string>

#include "small_host.h"

namespace hosts {

// One thread runs steps in an endless loop; another one calls exit during a step.
int exit_during_a_step(SmallHost& host, bool from_main);

// Runs four threads for `seconds`: one holds a host lock around each step, one reads statistics and metrics without the
// lock, and two do C++ work under the lock, as a scheduler and a device queue do. A deadlock between the lock and the GIL
// would hang. Prints the number of steps and of work items.
int threads(SmallHost& host, double seconds);

// Measures a C++ thread's work during Python steps on another thread, relative to its work while the other thread burns
// as much CPU time without Python. Prints the ratio.
int gil_loss(SmallHost& host, double seconds);

// Creates, uses and destroys hosts on several threads until the first thread calls shutdown. Running calls complete, and
// every thread's next call throws. Prints each thread's error.
int shutdown_during_steps(const std::string& model_path);

// Calls shutdown on this thread, which holds the GIL, while another thread runs steps. Prints the other thread's error.
int shutdown_with_the_gil(SmallHost& host);

// Makes the same call on two threads: first on one without the GIL, which needs it to finish, then on this one, which
// holds it. Prints their errors.
int call_on_two_threads(const std::function<void()>& call);

// Runs steps on threads that Python creates and joins one after the other; they call the host without the GIL.
int steps_on_python_threads(SmallHost& host);

// Starts a thread that runs steps in an endless loop, and returns.
int leave_a_thread_in_steps(const std::string& model_path);

// Calls exit while another thread destroys a host. The destructor takes a second, then prints to stderr.
int exit_during_a_destructor(const std::string& model_path);

// Plants a data race without Python, which a thread sanitizer must report.
int race();

// Plants a memory leak without Python, which a leak sanitizer must report.
int leak();

}  // namespace hosts
