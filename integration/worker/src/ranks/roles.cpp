#include "ranks/roles.h"

#include <nlohmann/json.hpp>

#include "ranks/rank_info.h"
#include "ranks/step_codec.h"
#include "strict_json.h"

namespace xllm_worker {

namespace {

using nlohmann::json;

constexpr std::chrono::milliseconds kEndLimit{10000};
constexpr std::chrono::milliseconds kStatsLimit{60000};

json difference(const json& now, const json& before) {
  json result = json::object();
  for (const auto& [op, counts] : now.items()) {
    const int64_t calls = before.contains(op) ? before[op][0].get<int64_t>() : 0;
    const int64_t bytes = before.contains(op) ? before[op][1].get<int64_t>() : 0;
    result[op] = {{"calls", counts[0].get<int64_t>() - calls}, {"bytes", counts[1].get<int64_t>() - bytes}};
  }
  return result;
}

// Each layer has two all-reduces of equal size. The embedding's has that size too, so the mean is exact.
double bytes_per_layer_and_step(const json& traffic) {
  if (!traffic.contains("all_reduce") || traffic["all_reduce"]["calls"] == 0) return 0;
  return 2 * traffic["all_reduce"]["bytes"].get<double>() / traffic["all_reduce"]["calls"].get<double>();
}

}  // namespace

void check_ranks_agree(RankGroup& ranks, const json& info, std::chrono::milliseconds limit) {
  RankLink& link = ranks.link();
  if (link.rank() != 0) {
    link.send(0, FrameType::kRankInfo, info.dump());
    link.receive(0);  // no time limit: this rank may have loaded long before rank 0
    return;
  }
  const Deadline deadline(limit);
  for (int64_t rank = 1; rank < ranks.config().size; ++rank) {
    const json other = parse_strict_json(link.receive(rank, deadline, "did not load the model").payload);
    const std::string problem = describe_difference(info, other, rank);
    if (problem.empty()) continue;
    link.abort(problem);
    throw RankFailure(problem);
  }
  link.send_all(FrameType::kStart);
}

LeaderModel::LeaderModel(StepExecutor executor, RankGroup& ranks, std::function<void()> leave_group)
    : model_(std::move(executor), this),
      ranks_(ranks),
      leave_group_(std::move(leave_group)),
      traffic_before_(std::make_unique<json>(json::parse(model_.executor().model().traffic_json()))) {}

LeaderModel::~LeaderModel() = default;

void LeaderModel::begin(std::span<const BatchEntry> entries) {
  ranks_.link().begin_step();
  ranks_.link().send_all(FrameType::kStep, encode_step(entries));
  ++num_steps_;
  for (const BatchEntry& entry : entries) {
    num_tokens_ += std::ssize(entry.new_tokens);
    num_logits_ += entry.wants_logits ? 1 : 0;
  }
}

void LeaderModel::fail(const std::string& message) {
  ranks_.link().check_all_failed(message);
  ranks_.link().end_step();
}

std::string LeaderModel::stats_json() {
  json stats = json::parse(model_.stats_json());
  json others = json::array();
  ranks_.link().send_all(FrameType::kAskStats);
  for (int64_t rank = 1; rank < ranks_.config().size; ++rank) {
    others.push_back(parse_strict_json(ranks_.link().receive(rank, kStatsLimit, "did not send its stats").payload));
  }
  const json traffic = difference(json::parse(model_.executor().model().traffic_json()), *traffic_before_);
  stats["tensor_parallel"] = {{"size", ranks_.config().size},
                              {"num_steps", num_steps_},
                              {"num_tokens", num_tokens_},
                              {"num_logits", num_logits_},
                              {"traffic", traffic},
                              {"bytes_per_layer_and_step", bytes_per_layer_and_step(traffic)},
                              {"other_ranks", std::move(others)}};
  return stats.dump();
}

void LeaderModel::shutdown() {
  RankLink& link = ranks_.link();
  link.send_all(FrameType::kEnd);
  model_.shutdown();
  leave_group_();
  for (int64_t rank = 1; rank < ranks_.config().size; ++rank) link.receive(rank, kEndLimit, "did not end");
  ranks_.processes().wait(kEndLimit);
}

void follow(RankGroup& ranks, StepExecutor executor, const std::function<void()>& leave_group) {
  RankLink& link = ranks.link();
  while (true) {
    const Frame frame = link.receive(0);
    if (frame.type == FrameType::kAskStats) {
      link.send(0, FrameType::kStats, executor.model().stats_json());
    } else if (frame.type == FrameType::kStep) {
      const DecodedStep step(frame.payload);
      link.begin_step();
      std::string problem;
      try {
        executor.execute(step.entries());
      } catch (const std::exception& error) {
        problem = *error.what() == '\0' ? "unknown error" : error.what();
      }
      link.end_step();
      link.send(0, FrameType::kDone, problem);
    } else {
      break;
    }
  }
  executor.model().shutdown();
  leave_group();
  link.send(0, FrameType::kEnd);
}

}  // namespace xllm_worker
