#include <chrono>
#include <iostream>
#include <thread>

#include "core_probe.h"
#include "engine.h"
#include "recall_model.h"
#include "serving.h"

namespace xllm_worker::probe {

using nlohmann::json;

namespace {

struct Setup {
  explicit Setup(const json& settings, RecallModel::OnStep on_step)
      : blocks(settings.at("num_blocks"), settings.at("block_size"), settings.value("enable_prefix_cache", false)),
        model(blocks.num_slots(),
              blocks.block_size(),
              settings.at("vocab_size"),
              settings.value("fail_on", -1),
              settings.value("nan_on", -1),
              std::move(on_step)),
        limits{{settings.at("max_seqs"),
                settings.at("max_tokens"),
                settings.value("max_mixed_prefill_tokens", int64_t{512})},
               settings.at("max_model_len"),
               settings.value("eos_token_ids", std::vector<int32_t>{})},
        request_limits{settings.at("vocab_size"), settings.at("max_model_len"), blocks.num_slots()} {}

  BlockManager blocks;
  RecallModel model;
  EngineLimits limits;
  RequestLimits request_limits;
};

json describe(const ScheduledSequence& part) {
  return {{"id", part.sequence->request.id},
          {"num_new", part.num_new},
          {"num_cached", part.sequence->num_cached},
          {"num_tokens", part.sequence->num_tokens()},
          {"tokens", part.sequence->tokens},
          {"blocks", part.sequence->blocks},
          {"needs_token", part.needs_token()}};
}

}  // namespace

json probe_schedule(const json& input) {
  json steps = json::array();
  Setup setup(input, [&](std::span<const ScheduledSequence> batch) {
    json step = json::array();
    for (const ScheduledSequence& part : batch) step.push_back(describe(part));
    steps.push_back(std::move(step));
  });
  std::string events;
  Engine engine(
      setup.model, setup.blocks, setup.limits, [&](std::string_view text) { events += text; }, [](const auto&) {});

  const json& requests = input.at("requests");  // in order of arrival
  size_t next = 0;
  int64_t now = 0;
  while (next < requests.size() || engine.has_work()) {
    for (; next < requests.size() && requests[next].at("arrival") <= now; ++next) {
      engine.handle(parse_input_line(
          requests[next].at("line").get<std::string>(), static_cast<int64_t>(next) + 1, setup.request_limits));
    }
    if (engine.has_work()) engine.step();
    ++now;
  }
  engine.handle({0, StatsCommand{}});
  json lines = json::array();
  for (size_t begin = 0, end; (end = events.find('\n', begin)) != std::string::npos; begin = end + 1) {
    lines.push_back(json::parse(events.substr(begin, end - begin)));
  }
  return {{"steps", steps}, {"events", lines}};
}

int serve(const json& settings) try {
  open_standard_descriptors();
  StopSignals signals;
  const auto delay = std::chrono::milliseconds(settings.value("step_ms", 0));
  Setup setup(settings, [delay](auto) { std::this_thread::sleep_for(delay); });
  WorkerOptions options;
  options.max_seqs_per_batch = setup.limits.scheduler.max_seqs;
  options.max_tokens_per_batch = setup.limits.scheduler.max_tokens;
  options.max_mixed_prefill_tokens = setup.limits.scheduler.max_mixed_prefill_tokens;
  options.max_queued_requests = settings.value("max_queued_requests", 4096);
  options.enable_prefix_cache = settings.value("enable_prefix_cache", false);
  ServerInfo info;
  info.vocab_size = setup.request_limits.vocab_size;
  info.max_model_len = setup.limits.max_model_len;
  info.num_blocks = setup.blocks.num_blocks();
  info.block_size = setup.blocks.block_size();
  info.eos_token_ids = setup.limits.eos_token_ids;
  ProtocolOutput output;
  std::cout << "a library prints to stdout" << std::endl;
  xllm_worker::serve(options, info, setup.model, output, signals);
  return signals.received() == 0 ? 0 : 128 + signals.received();
} catch (const std::exception& error) {
  write_log(std::string("error: ") + error.what());
  return 1;
}

}  // namespace xllm_worker::probe
