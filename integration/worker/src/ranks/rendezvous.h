// The rendezvous: rank 0 writes its listening address to a c10d store, and the other ranks connect to it.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ranks/link.h"
#include "ranks/rank_config.h"
#include "ranks/processes.h"

namespace c10d {
class TCPStore;
}

namespace xllm_worker {

struct RendezvousOptions {
  std::chrono::milliseconds start_timeout{300000};  // until all ranks have connected
  std::chrono::milliseconds timeout{60000};
};

// This process's connections to the other ranks of the model. Exists until the process ends.
class RankGroup {
 public:
  // Connects to the other ranks. With config.spawns_ranks, starts them first, with the arguments of this program.
  // Throws RankFailure with the ranks that did not connect.
  RankGroup(RankConfig config, const std::vector<std::string>& args, const RendezvousOptions& options);
  ~RankGroup();

  const RankConfig& config() const { return config_; }  // with the store's port
  RankLink& link() { return *link_; }
  RankProcesses& processes() { return processes_; }

 private:
  void open_store(const RendezvousOptions& options);
  std::map<int64_t, Socket> accept_ranks(const std::vector<std::string>& args, const RendezvousOptions& options);
  // Reads the hello frame and returns the rank; nullopt when the connection is not from a rank.
  std::optional<int64_t> accept_hello(const Socket& socket, const std::map<int64_t, Socket>& present) const;
  Socket connect_to_leader(const RendezvousOptions& options);
  std::string link_key() const { return config_.store_prefix + "/link"; }

  RankConfig config_;
  RankProcesses processes_;
  std::unique_ptr<c10d::TCPStore> store_;
  std::unique_ptr<RankLink> link_;
};

}  // namespace xllm_worker
