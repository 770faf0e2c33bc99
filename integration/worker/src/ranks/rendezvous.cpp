#include "ranks/rendezvous.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <nlohmann/json.hpp>

namespace xllm::worker {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kHelloLimit{5000};
constexpr milliseconds kPoll{100};

std::string address(const RankPlace& place) { return place.host + ":" + std::to_string(place.port); }

std::string seconds(milliseconds time) { return std::to_string(time.count() / 1000) + " s"; }

std::string rank_name(int64_t rank) { return "rank " + std::to_string(rank); }

}  // namespace

RankGroup::RankGroup(RankPlace place, const std::vector<std::string>& args, const RendezvousOptions& options)
    : place_(std::move(place)) {
  open_store(options);
  std::map<int64_t, Socket> peers;
  if (place_.rank == 0) {
    peers = gather(args, options);
  } else {
    peers.emplace(0, reach_leader(options));
  }
  LinkOptions link;
  link.silence = options.silence;
  link.ending = [this](int64_t rank) { return processes_.ending(rank); };
  link_ = std::make_unique<RankLink>(place_.rank, std::move(peers), std::move(link));
}

RankGroup::~RankGroup() = default;

void RankGroup::open_store(const RendezvousOptions& options) {
  c10d::TCPStoreOptions store;
  store.port = static_cast<uint16_t>(place_.port);
  store.isServer = place_.rank == 0 && !place_.store_is_served;
  store.waitWorkers = false;
  store.timeout = options.limit;
  try {
    store_ = std::make_unique<c10d::TCPStore>(place_.host, store);
  } catch (const std::exception& error) {
    if (store.isServer) {
      throw RankFailure("rank 0 cannot serve the ranks' store at " + address(place_) + ": " + error.what());
    }
    throw RankFailure("nobody answered at " + address(place_) + ", where rank 0 should be, within " +
                      seconds(options.limit));
  }
  place_.port = store_->getPort();
}

std::map<int64_t, Socket> RankGroup::gather(const std::vector<std::string>& args, const RendezvousOptions& options) {
  const auto deadline = Clock::now() + options.limit;
  const auto [listener, port] = listen_on(place_.host);
  const std::string where = place_.host + ":" + std::to_string(port);
  store_->set(link_key(), std::vector<uint8_t>(where.begin(), where.end()));
  if (place_.starts_others) processes_.start(args, place_);
  std::map<int64_t, Socket> present;
  try {
    while (std::ssize(present) < place_.size - 1) {
      if (Socket socket = accept_within(listener, kPoll)) {
        if (const auto rank = admit(socket, present)) present.emplace(*rank, std::move(socket));
      }
      if (const auto [rank, how] = processes_.first_ended(); rank > 0) {
        throw RankFailure(rank_name(rank) + " did not come: " + how);
      }
      if (Clock::now() < deadline) continue;
      std::string missing;
      for (int64_t rank = 1; rank < place_.size; ++rank) {
        if (!present.contains(rank)) missing += (missing.empty() ? "rank " : ", ") + std::to_string(rank);
      }
      throw RankFailure(missing + " did not come to " + address(place_) + " within " + seconds(options.limit));
    }
  } catch (const RankFailure& failure) {
    for (const auto& [rank, socket] : present) write_frame(socket, FrameType::kAbort, failure.what(), kPoll);
    throw;
  }
  return present;
}

std::optional<int64_t> RankGroup::admit(const Socket& socket, const std::map<int64_t, Socket>& present) const {
  const std::optional<Frame> hello = read_frame(socket, kHelloLimit);
  if (!hello || hello->type != FrameType::kHello) return std::nullopt;
  const nlohmann::json who = nlohmann::json::parse(hello->payload, nullptr, /*allow_exceptions=*/false);
  if (!who.is_object()) return std::nullopt;
  const int64_t rank = who.value("rank", int64_t{-1});
  const int64_t size = who.value("size", int64_t{-1});
  std::string problem;
  if (size != place_.size) {
    problem = rank_name(rank) + " was started as one of " + std::to_string(size) + " ranks, rank 0 as one of " +
              std::to_string(place_.size);
  } else if (rank < 1 || rank >= size || present.contains(rank)) {
    problem = rank_name(rank) + " came twice";
  }
  if (problem.empty()) return rank;
  write_frame(socket, FrameType::kAbort, problem, kPoll);
  throw RankFailure(problem);
}

Socket RankGroup::reach_leader(const RendezvousOptions& options) {
  std::string where;
  try {
    const std::vector<uint8_t> value = store_->get(link_key());
    where.assign(value.begin(), value.end());
  } catch (const std::exception&) {
    throw RankFailure("rank 0 did not come to " + address(place_) + " within " + seconds(options.limit));
  }
  const size_t colon = where.rfind(':');
  Socket socket = connect_to(where.substr(0, colon), std::stoll(where.substr(colon + 1)), options.limit);
  const nlohmann::json hello = {{"rank", place_.rank}, {"size", place_.size}};
  if (!write_frame(socket, FrameType::kHello, hello.dump(), options.limit)) throw RankFailure("rank 0 is gone");
  return socket;
}

}  // namespace xllm::worker
