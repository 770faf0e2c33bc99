// Lets tests drive the worker's batch builder and sampler without a model.
//   xllm_tensor_probe batch|sample   one JSON value in, one out, line by line
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "answer_lines.h"
#include "batch_builder.h"
#include "sampler.h"

namespace xllm::worker::probe {

using nlohmann::json;

namespace {

json values(const at::Tensor& tensor) {
  const int32_t* data = tensor.const_data_ptr<int32_t>();
  return std::vector<int32_t>(data, data + tensor.numel());
}

json values(const std::optional<at::Tensor>& tensor) { return tensor ? values(*tensor) : json(nullptr); }

// {"block_size", "entries": [{"tokens", "num_cached", "blocks", "wants_logits"}]} -> every tensor of the batch
json probe_batch(const json& input) {
  struct Owned {
    std::vector<int32_t> tokens, blocks;
  };
  std::vector<Owned> owned;
  owned.reserve(input.at("entries").size());
  std::vector<BatchEntry> entries;
  for (const json& entry : input.at("entries")) {
    const Owned& memory = owned.emplace_back(Owned{entry.at("tokens"), entry.at("blocks")});
    entries.push_back({memory.tokens, entry.at("num_cached"), memory.blocks, entry.at("wants_logits")});
  }
  const Batch batch = build_batch(entries, input.at("block_size"), at::Device(at::kCPU));
  const AttentionMetadata& metadata = batch.metadata;

  json output = {{"tokens", values(batch.tokens)},
                 {"positions", values(batch.positions)},
                 {"logits_indices", values(batch.logits_indices)}};
  bool is_aligned = true;
  for_each_property(metadata, [&]<class T>(std::string_view name, const T& value) {
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

int run(const std::string& mode) {
  if (mode == "batch") return answer_lines(probe_batch);
  if (mode == "sample") return answer_lines(probe_sample);
  std::cerr << "error: unknown mode '" << mode << "'\n";
  return 2;
}

}  // namespace

}  // namespace xllm::worker::probe

int main(int argc, char** argv) { return xllm::worker::probe::run(argc > 1 ? argv[1] : ""); }
