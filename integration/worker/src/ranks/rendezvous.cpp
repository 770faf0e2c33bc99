#include "ranks/rendezvous.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <nlohmann/json.hpp>

#include "strict_json.h"

namespace xllm_worker {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kHelloLimit{5000};
constexpr size_t kMaxHello = 256;  // bytes
constexpr milliseconds kPoll{100};

std::string address(const RankConfig& config) { return config.host + ":" + std::to_string(config.port); }

std::string seconds(milliseconds time) { return std::to_string(time.count() / 1000) + " s"; }

struct Hello {
  int64_t rank = 0;
  int64_t size = 0;  // number of ranks
};

// Anything may connect to the port. So this is nullopt for bytes that are no hello.
std::optional<Hello> read_hello(const Socket& socket) {
  const std::optional<Frame> frame = read_frame(socket, kMaxHello, kHelloLimit);
  if (!frame || frame->type != FrameType::kHello) return std::nullopt;
  try {
    const nlohmann::json hello = parse_strict_json(frame->payload);
    return Hello{hello.at("rank").get<int64_t>(), hello.at("size").get<int64_t>()};
  } catch (const JsonError&) {
  } catch (const nlohmann::json::exception&) {  // not an object, or a key is missing or no number
  }
  return std::nullopt;
}

std::string rank_name(int64_t rank) { return "rank " + std::to_string(rank); }

}  // namespace

RankGroup::RankGroup(RankConfig config, const std::vector<std::string>& args, const RendezvousOptions& options)
    : config_(std::move(config)) {
  open_store(options);
  std::map<int64_t, Socket> peers;
  if (config_.rank == 0) {
    peers = accept_ranks(args, options);
  } else {
    peers.emplace(0, connect_to_leader(options));
  }
  LinkOptions link;
  link.timeout = options.timeout;
  link.describe_exit = [this](int64_t rank) { return processes_.describe_exit(rank); };
  link_ = std::make_unique<RankLink>(config_.rank, std::move(peers), std::move(link));
}

RankGroup::~RankGroup() = default;

void RankGroup::open_store(const RendezvousOptions& options) {
  c10d::TCPStoreOptions store;
  store.port = static_cast<uint16_t>(config_.port);
  store.isServer = config_.rank == 0 && !config_.uses_agent_store;
  store.waitWorkers = false;
  store.timeout = options.start_timeout;
  try {
    store_ = std::make_unique<c10d::TCPStore>(config_.host, store);
  } catch (const std::exception& error) {
    if (store.isServer) {
      throw RankFailure("rank 0 cannot serve the ranks' store at " + address(config_) + ": " + error.what());
    }
    throw RankFailure("no answer at " + address(config_) + ", the address of rank 0, within " +
                      seconds(options.start_timeout));
  }
  config_.port = store_->getPort();
}

std::map<int64_t, Socket> RankGroup::accept_ranks(const std::vector<std::string>& args,
                                                  const RendezvousOptions& options) {
  const auto deadline = Clock::now() + options.start_timeout;
  const auto [listener, port] = listen_on(config_.host);
  const std::string where = config_.host + ":" + std::to_string(port);
  store_->set(link_key(), std::vector<uint8_t>(where.begin(), where.end()));
  if (config_.spawns_ranks) processes_.start(args, config_);
  std::map<int64_t, Socket> present;
  try {
    while (std::ssize(present) < config_.size - 1) {
      if (Socket socket = accept_within(listener, kPoll)) {
        if (const auto rank = accept_hello(socket, present)) present.emplace(*rank, std::move(socket));
      }
      if (const auto [rank, how] = processes_.first_exited(); rank > 0) {
        throw RankFailure(rank_name(rank) + " exited before it connected: " + how);
      }
      if (Clock::now() < deadline) continue;
      std::string missing;
      for (int64_t rank = 1; rank < config_.size; ++rank) {
        if (!present.contains(rank)) missing += (missing.empty() ? "rank " : ", ") + std::to_string(rank);
      }
      throw RankFailure(missing + " did not connect to " + address(config_) + " within " +
                        seconds(options.start_timeout));
    }
  } catch (const RankFailure& failure) {
    for (const auto& [rank, socket] : present) write_frame(socket, FrameType::kAbort, failure.what(), kPoll);
    throw;
  }
  return present;
}

std::optional<int64_t> RankGroup::accept_hello(const Socket& socket, const std::map<int64_t, Socket>& present) const {
  const std::optional<Hello> hello = read_hello(socket);
  if (!hello) return std::nullopt;
  const auto [rank, size] = *hello;
  std::string problem;
  if (size != config_.size) {
    problem = rank_name(rank) + " was started with tp_size " + std::to_string(size) + ", rank 0 with " +
              std::to_string(config_.size);
  } else if (rank < 1 || rank >= size || present.contains(rank)) {
    problem = rank_name(rank) + " connected twice";
  }
  if (problem.empty()) return rank;
  write_frame(socket, FrameType::kAbort, problem, kPoll);
  throw RankFailure(problem);
}

Socket RankGroup::connect_to_leader(const RendezvousOptions& options) {
  std::string where;
  try {
    const std::vector<uint8_t> value = store_->get(link_key());
    where.assign(value.begin(), value.end());
  } catch (const std::exception&) {
    throw RankFailure("rank 0 did not write its address to the store at " + address(config_) + " within " +
                      seconds(options.start_timeout));
  }
  const size_t colon = where.rfind(':');
  Socket socket = connect_to(where.substr(0, colon), std::stoll(where.substr(colon + 1)), options.start_timeout);
  const nlohmann::json hello = {{"rank", config_.rank}, {"size", config_.size}};
  if (!write_frame(socket, FrameType::kHello, hello.dump(), options.start_timeout)) throw RankFailure("rank 0 is gone");
  return socket;
}

}  // namespace xllm_worker
