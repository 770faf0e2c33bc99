// The other ranks of this machine, when rank 0 starts them: their start, what became of them, and their end.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ranks/place.h"

namespace xllm::worker {

class RankProcesses {
 public:
  RankProcesses() = default;
  // Those that are left get SIGKILL.
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // Starts this program again for ranks 1 to place.size - 1, with the same arguments and torchrun's environment. They
  // end with this process, their stdin is empty and their stdout is stderr.
  void start(const std::vector<std::string>& args, const RankPlace& place);

  // How the rank's process ended, "killed by signal 9 (Killed)"; empty while it runs or was not started here.
  std::string ending(int64_t rank);

  // A rank that has ended, with its ending; 0 when none has.
  std::pair<int64_t, std::string> first_ended();

  // Waits for all to end; kills those that have not after `limit`.
  void wait(std::chrono::milliseconds limit);

 private:
  std::string collect(int64_t rank);  // with the mutex held

  std::mutex mutex_;
  std::map<int64_t, pid_t> running_;
  std::map<int64_t, std::string> ended_;
};

}  // namespace xllm::worker
