// Lifecycle scenarios with several threads. Each returns the exit code.
#pragma once

#include <functional>
#include <string>

#include "small_host.h"

namespace hosts {

// One thread runs steps for ever; another leaves the process meanwhile.
int exit_in_mid_step(SmallHost& host, bool from_main);

// Steps on one thread, health on another, and two that take a lock of the host and work, the way a scheduler and a device
// queue do: the lock is held around a step by one, and around nothing that calls Python by the others. Prints how much
// got done.
int threads(SmallHost& host, double seconds);

// Measures C++ work of a thread during Python steps, relative to that during a call that uses as much CPU
// time without Python. Prints the ratio.
int gil_loss(SmallHost& host, double seconds);

// Hosts made, used and destroyed on different threads, until the first thread shuts Python down in the middle of it:
// calls that run are waited for, and every thread is refused its next one. Prints each thread's error.
int shutdown_beside_steps(const std::string& model_path);

// Steps on another thread while this one, which holds the GIL as a host that runs Python itself may, shuts Python down.
// Prints the other thread's error.
int shutdown_with_the_gil(SmallHost& host);

// Makes a call on this thread, which holds the GIL, and on another one without it, which comes first and needs the GIL to
// get on. Prints their errors.
int beside_another_thread(const std::function<void()>& call);

// Steps on threads that Python makes and ends, one after the other, which call the host without the GIL.
int steps_on_python_threads(SmallHost& host);

// Returns while a thread of its own runs steps for ever.
int leave_a_thread_in_steps(const std::string& model_path);

// Leaves the process while another thread destroys a host whose destruction takes a while and says on stderr when it is
// done.
int exit_in_mid_destruction(const std::string& model_path);

// Two threads that write one number without a lock, and no Python: what a thread sanitizer must report.
int race();

}  // namespace hosts
