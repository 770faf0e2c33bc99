// How the ranks find each other: rank 0 tells in a c10d store where it listens, and the others connect.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ranks/link.h"
#include "ranks/place.h"
#include "ranks/processes.h"

namespace c10d {
class TCPStore;
}

namespace xllm::worker {

struct RendezvousOptions {
  std::chrono::milliseconds limit{300000};  // until all ranks are there
  std::chrono::milliseconds silence{60000};
};

// The ranks of one model as this process sees them. Lives until the process ends.
class RankGroup {
 public:
  // Meets the others; starts them first when the place says so, with the arguments of this program. Throws RankFailure
  // that names who did not come.
  RankGroup(RankPlace place, const std::vector<std::string>& args, const RendezvousOptions& options);
  ~RankGroup();

  const RankPlace& place() const { return place_; }  // with the store's port
  RankLink& link() { return *link_; }
  RankProcesses& processes() { return processes_; }

 private:
  void open_store(const RendezvousOptions& options);
  std::map<int64_t, Socket> gather(const std::vector<std::string>& args, const RendezvousOptions& options);
  // Which rank has come; nothing for what is none.
  std::optional<int64_t> admit(const Socket& socket, const std::map<int64_t, Socket>& present) const;
  Socket reach_leader(const RendezvousOptions& options);
  std::string link_key() const { return place_.store_prefix + "/link"; }

  RankPlace place_;
  RankProcesses processes_;
  std::unique_ptr<c10d::TCPStore> store_;
  std::unique_ptr<RankLink> link_;
};

}  // namespace xllm::worker
