// Internal: counts the calls that threads are in, so that shutdown and exit can wait for them.
#pragma once

namespace xllm::executor {

// One call into Python. Throws std::runtime_error, without counting, when Python is not started, shut down or the process
// is exiting.
class ActiveCall {
 public:
  ActiveCall();
  ~ActiveCall();
  ActiveCall(const ActiveCall&) = delete;
  ActiveCall& operator=(const ActiveCall&) = delete;
};

}  // namespace xllm::executor
