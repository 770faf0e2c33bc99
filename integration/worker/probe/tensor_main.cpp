// Test program: drives the batch builder, the sampler, StepsInFlight and the check of token ids without a model.
//   xllm_tensor_probe batch|sample|in_flight|token_ids   one JSON value in, one out, line by line
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "answer_lines.h"
#include "batch_builder.h"
#include "sampler.h"
#include "steps_in_flight.h"
#include "token_ids.h"

namespace xllm_worker::probe {

using nlohmann::json;

namespace {

json values(const at::Tensor& given) {
  const at::Tensor tensor = given.to(at::kInt);
  const int32_t* data = tensor.const_data_ptr<int32_t>();
  return std::vector<int32_t>(data, data + tensor.numel());
}

json values(const std::optional<at::Tensor>& tensor) { return tensor ? values(*tensor) : json(nullptr); }

// {"block_size", "has_states", "num_groups", "entries": [{"tokens", "num_cached", "blocks", "wants_logits", "state_slot",
// "group_blocks"}]} -> every tensor of the batch
json probe_batch(const json& input) {
  struct Owned {
    std::vector<int32_t> tokens, blocks;
    std::vector<std::vector<int32_t>> group_blocks;
  };
  std::vector<Owned> owned;
  owned.reserve(input.at("entries").size());
  std::vector<BatchEntry> entries;
  for (const json& entry : input.at("entries")) {
    const Owned& memory = owned.emplace_back(
        Owned{entry.at("tokens"), entry.at("blocks"), entry.value("group_blocks", std::vector<std::vector<int32_t>>())});
    entries.push_back({memory.tokens, entry.at("num_cached"), memory.blocks, entry.at("wants_logits"),
                       {memory.group_blocks.begin(), memory.group_blocks.end()}, entry.value("state_slot", -1)});
  }
  const Batch batch = build_batch(entries, input.at("block_size"), at::Device(at::kCPU), input.value("has_states", false),
                                  input.value("num_groups", int64_t{0}));
  const AttentionMetadata& metadata = batch.metadata;

  json output = {{"tokens", values(batch.tokens)},
                 {"positions", values(batch.positions)},
                 {"logits_indices", values(batch.logits_indices)}};
  bool is_aligned = true;
  xllm_metadata::for_each_property(metadata, [&]<class T>(std::string_view name, const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>) {
      output["metadata"][std::string(name)] = values(value);
    } else {
      output["metadata"][std::string(name)] = value;
    }
    if constexpr (std::is_same_v<T, at::Tensor>) {
      is_aligned = is_aligned && reinterpret_cast<uintptr_t>(value.const_data_ptr()) % 16 == 0;
    }
  });
  output["is_aligned"] = is_aligned;
  output["is_one_buffer"] = batch.tokens.storage().is_alias_of(metadata.kv_seq_lens_host().storage());
  return output;
}

// {"logits": [[number or null for NaN]], "vocab_size", "dtype"} -> tokens
json probe_sample(const json& input) {
  const json& rows = input.at("logits");
  const int64_t width = input.at("vocab_size");
  at::Tensor logits = at::empty({static_cast<int64_t>(rows.size()), width}, at::TensorOptions().dtype(at::kFloat));
  float* data = logits.mutable_data_ptr<float>();
  for (const json& row : rows) {
    for (const json& value : row) *data++ = value.is_null() ? NAN : value.get<float>();
  }
  if (input.at("dtype") == "bfloat16") logits = logits.to(at::kBFloat16);
  return sample_greedy(logits);
}

// A fake device that implements only events. The test says how many recorded events have completed.
class SlowDevice final : public c10::impl::DeviceGuardImplInterface {
 public:
  static inline int64_t num_recorded = 0, num_passed = 0;

  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {type(), 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = new int64_t(++num_recorded);
  }
  bool queryEvent(void* event) const override { return *static_cast<int64_t*>(event) <= num_passed; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SlowDevice)

// {"device", "steps": [[marked, number of completed events before it]]} -> after each step, the steps whose inputs are
// kept
json probe_in_flight(const json& input) {
  SlowDevice::num_recorded = SlowDevice::num_passed = 0;
  StepsInFlight steps{at::Device(input.at("device").get<std::string>())};
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> inputs;
  json answer = json::array();
  for (const json& step : input.at("steps")) {
    SlowDevice::num_passed = step.at(1);
    Batch batch;
    batch.tokens = at::empty({1}, at::kInt);
    inputs.emplace_back(batch.tokens.getIntrusivePtr());
    steps.hold(std::move(batch));
    if (step.at(0)) steps.mark();
    json alive = json::array();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].expired()) alive.push_back(i);
    }
    answer.push_back(alive);
  }
  return answer;
}

// {"token_ids", "vocab_size"} -> null, or an error
json probe_token_ids(const json& input) {
  const std::vector<int32_t> ids = input.at("token_ids");
  const at::Tensor tokens = at::empty({std::ssize(ids)}, at::kInt);
  std::copy(ids.begin(), ids.end(), tokens.mutable_data_ptr<int32_t>());
  check_token_ids(tokens, input.at("vocab_size"));
  return nullptr;
}

int run(const std::string& mode) {
  if (mode == "batch") return answer_lines(probe_batch);
  if (mode == "sample") return answer_lines(probe_sample);
  if (mode == "in_flight") return answer_lines(probe_in_flight);
  if (mode == "token_ids") return answer_lines(probe_token_ids);
  std::cerr << "error: unknown mode '" << mode << "'\n";
  return 2;
}

}  // namespace

}  // namespace xllm_worker::probe

int main(int argc, char** argv) { return xllm_worker::probe::run(argc > 1 ? argv[1] : ""); }
