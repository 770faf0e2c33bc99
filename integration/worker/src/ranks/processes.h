// Starts the other ranks as child processes of rank 0, reports how they exited, and kills those that do not.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ranks/rank_config.h"

namespace xllm_worker {

class RankProcesses {
 public:
  RankProcesses() = default;
  // Sends SIGKILL to the ranks that still run.
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // Starts this program for ranks 1 to config.size - 1, with the same arguments and torchrun's environment variables.
  // Their stdin is /dev/null, their stdout is stderr, and the kernel kills them when this process ends.
  void start(const std::vector<std::string>& args, const RankConfig& config);

  // How the rank's process exited, for example "killed by signal 9 (Killed)". Empty while it runs, or if it was not
  // started here.
  std::string describe_exit(int64_t rank);

  // A rank that has exited since the last call, and how; (0, "") when none has.
  std::pair<int64_t, std::string> first_exited();

  // Waits until all have exited; kills those that still run after `limit`.
  void wait(std::chrono::milliseconds limit);

 private:
  std::string reap(int64_t rank);  // with the mutex held

  std::mutex mutex_;
  std::map<int64_t, pid_t> running_;
  std::map<int64_t, std::string> exited_;
};

}  // namespace xllm_worker
