#include "ranks/processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace xllm_worker {

namespace {

std::vector<std::string> child_environment(const RankConfig& config, int64_t rank) {
  const std::map<std::string, std::string> set = {{"RANK", std::to_string(rank)},
                                                  {"LOCAL_RANK", std::to_string(rank)},
                                                  {"WORLD_SIZE", std::to_string(config.size)},
                                                  {"MASTER_ADDR", config.host},
                                                  {"MASTER_PORT", std::to_string(config.port)}};
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!set.contains(text.substr(0, text.find('='))) && !text.starts_with("TORCHELASTIC_")) result.push_back(text);
  }
  for (const auto& [name, value] : set) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return "killed by signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
  }
  return "ended with exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

RankProcesses::~RankProcesses() { wait(std::chrono::milliseconds(0)); }

void RankProcesses::start(const std::vector<std::string>& args, const RankConfig& config) {
  std::vector<std::string> words = {"xllm_worker"};
  words.insert(words.end(), args.begin(), args.end());
  const std::vector<char*> argv = pointers(words);
  const pid_t parent = getpid();
  for (int64_t rank = 1; rank < config.size; ++rank) {
    std::vector<std::string> environment = child_environment(config, rank);
    const std::vector<char*> envp = pointers(environment);
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("cannot start rank " + std::to_string(rank) + ": " + std::strerror(errno));
    if (child == 0) {  // only system calls until exec: other threads may hold any lock
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      const int null = open("/dev/null", O_RDONLY);
      dup2(null, STDIN_FILENO);
      dup2(STDERR_FILENO, STDOUT_FILENO);
      execve("/proc/self/exe", argv.data(), envp.data());
      _exit(127);
    }
    const std::lock_guard lock(mutex_);
    running_[rank] = child;
  }
}

std::string RankProcesses::reap(int64_t rank) {
  if (const auto found = exited_.find(rank); found != exited_.end()) return found->second;
  const auto process = running_.find(rank);
  int status = 0;
  if (process == running_.end() || waitpid(process->second, &status, WNOHANG) != process->second) return "";
  running_.erase(process);
  return exited_[rank] = describe(status);
}

std::string RankProcesses::describe_exit(int64_t rank) {
  const std::lock_guard lock(mutex_);
  return reap(rank);
}

std::pair<int64_t, std::string> RankProcesses::first_exited() {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, process] : std::map(running_)) {
    if (std::string how = reap(rank); !how.empty()) return {rank, std::move(how)};
  }
  return {0, ""};
}

void RankProcesses::wait(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const std::lock_guard lock(mutex_);
  while (!running_.empty()) {
    for (const auto& [rank, process] : std::map(running_)) {
      if (reap(rank).empty() && std::chrono::steady_clock::now() >= deadline) kill(process, SIGKILL);
    }
    if (!running_.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace xllm_worker
