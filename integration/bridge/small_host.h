// A model with its executor and decode steps of one sequence, for the lifecycle scenarios.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host_inputs.h"
#include "xllm_executor/executor.h"
#include "xllm_metadata/host_mirrors.h"

namespace hosts {

// A decode step of one sequence of `length` tokens in pages 1, 2, ...; the mirrors are completed as a framework does
// that has only the KV lengths.
inline xllm_metadata::AttentionMetadata decode_metadata(int32_t length) {
  const auto num_pages = static_cast<int32_t>((length + kPageSize - 1) / kPageSize);
  std::vector<int32_t> pages;
  for (int32_t page = 1; page <= num_pages; ++page) {
    pages.push_back(page);
  }
  xllm_metadata::AttentionMetadata metadata;
  metadata.slot_mapping(int32({static_cast<int32_t>(num_pages * kPageSize + (length - 1) % kPageSize)}))
      .paged_kv_indptr(int32({0, num_pages}))
      .paged_kv_indices(int32(pages))
      .paged_kv_last_page_len(int32({static_cast<int32_t>((length - 1) % kPageSize + 1)}))
      .kv_cu_seq_lens(int32({0, length}))
      .kv_seq_lens_host(int32({0, length}));
  xllm_metadata::complete_host_mirrors(metadata, kPageSize);
  return metadata;
}

class SmallHost {
 public:
  explicit SmallHost(const std::string& model_path, const xllm_executor::Config& config = {})
      : model_(xllm_executor::PyCausalLM::load({.model_path = model_path, .dtype = "float32"})),
        executor_(model_, config, 4) {
    executor_.bind_kv_caches(make_caches(model_));
  }

  at::Tensor step(int32_t length = 3, int32_t token = 8) {
    const xllm_metadata::AttentionMetadata metadata = decode_metadata(length);
    return executor_.execute({int32({token}), int32({length - 1}), metadata, int32({0})}).logits;
  }

  int steps(int count) {
    for (int i = 0; i < count; ++i) {
      (void)step(1 + i % 8);
    }
    return 0;
  }

  xllm_executor::PyExecutor& executor() { return executor_; }

 private:
  xllm_executor::PyCausalLM model_;
  xllm_executor::PyExecutor executor_;
};

}  // namespace hosts
