/// @file
/// Derives absent host mirrors of a step's metadata, for a framework that has only cumulative KV lengths on the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "xllm_metadata/attention_metadata.h"

namespace xllm_metadata {

namespace detail {

inline at::Tensor host_int32(int64_t size, bool pinned) {
  return at::empty({size}, at::TensorOptions().dtype(at::kInt).pinned_memory(pinned));
}

inline std::string element(const char* name, const int32_t* values, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]);
}

/// Throws unless the tensor is a host indptr: int32 [B + 1], contiguous, from 0, non-decreasing.
inline void check_host_indptr(const at::Tensor& tensor, const char* name) {
  if (!tensor.is_cpu() || tensor.scalar_type() != at::kInt || tensor.dim() != 1 || !tensor.is_contiguous() ||
      tensor.numel() < 1) {
    throw std::invalid_argument(std::string("complete_host_mirrors: ") + name +
                                " must be a contiguous int32 tensor [B + 1] on the host");
  }
  const auto* values = tensor.const_data_ptr<int32_t>();
  if (values[0] != 0) {
    throw std::invalid_argument("complete_host_mirrors: " + element(name, values, 0) +
                                "; it must be 0: lengths are cumulative");
  }
  for (int64_t i = 1; i < tensor.numel(); ++i) {
    if (values[i] < values[i - 1]) {
      throw std::invalid_argument("complete_host_mirrors: " + element(name, values, i) + "; " +
                                  element(name, values, i - 1) + ", and it must not fall below that");
    }
  }
}

}  // namespace detail

/// Computes absent fields from kv_seq_lens_host (cumulative, [B + 1]) and the page size: paged_kv_indptr_host,
/// paged_kv_last_page_len_host, max_query_len, max_seq_len, and in a prefill step qo_indptr_host, which then equals
/// kv_seq_lens_host. Leaves present fields unchanged. Reads no device tensor. New mirrors are pinned when slot_mapping
/// is on a CUDA device.
/// Throws std::invalid_argument if page_size is below 1, kv_seq_lens_host is absent, qo_indptr_host is absent in a
/// chunked step (no other field determines it), or one of the two is no indptr of B + 1 entries.
inline void complete_host_mirrors(AttentionMetadata& metadata, int64_t page_size) {
  if (page_size < 1) {
    throw std::invalid_argument("complete_host_mirrors: page_size is " + std::to_string(page_size) +
                                "; it must be at least 1");
  }
  if (!metadata.kv_seq_lens_host().defined()) {
    throw std::invalid_argument("complete_host_mirrors: kv_seq_lens_host is absent; the other mirrors derive from it");
  }
  detail::check_host_indptr(metadata.kv_seq_lens_host(), "kv_seq_lens_host");
  const bool decode = !metadata.is_prefill() && !metadata.is_chunked_prefill();
  if (!decode && !metadata.qo_indptr_host().has_value()) {
    if (!metadata.is_prefill()) {
      throw std::invalid_argument(
          "complete_host_mirrors: qo_indptr_host is absent; in a chunked step no other field determines it");
    }
    metadata.qo_indptr_host(metadata.kv_seq_lens_host());
  }

  if (metadata.qo_indptr_host().has_value()) {
    detail::check_host_indptr(*metadata.qo_indptr_host(), "qo_indptr_host");
    if (metadata.qo_indptr_host()->numel() != metadata.kv_seq_lens_host().numel()) {
      throw std::invalid_argument("complete_host_mirrors: qo_indptr_host has " +
                                  std::to_string(metadata.qo_indptr_host()->numel()) + " entries; B + 1 is " +
                                  std::to_string(metadata.kv_seq_lens_host().numel()) + " in kv_seq_lens_host");
    }
  }

  const int64_t num_seqs = metadata.kv_seq_lens_host().numel() - 1;
  const bool pinned = metadata.slot_mapping().defined() && metadata.slot_mapping().is_cuda();
  const auto* kv = metadata.kv_seq_lens_host().const_data_ptr<int32_t>();
  if (!metadata.paged_kv_indptr_host().defined()) {
    at::Tensor pages = detail::host_int32(num_seqs + 1, pinned);
    auto* out = pages.mutable_data_ptr<int32_t>();
    out[0] = 0;
    for (int64_t i = 0; i < num_seqs; ++i) {
      out[i + 1] = out[i] + static_cast<int32_t>((kv[i + 1] - kv[i] + page_size - 1) / page_size);
    }
    metadata.paged_kv_indptr_host(pages);
  }
  if (!metadata.paged_kv_last_page_len_host().defined()) {
    at::Tensor last = detail::host_int32(num_seqs, pinned);
    auto* out = last.mutable_data_ptr<int32_t>();
    for (int64_t i = 0; i < num_seqs; ++i) {
      const int64_t length = kv[i + 1] - kv[i];
      out[i] = length == 0 ? 0 : static_cast<int32_t>((length - 1) % page_size + 1);
    }
    metadata.paged_kv_last_page_len_host(last);
  }
  const auto longest = [num_seqs](const int32_t* indptr) {
    int64_t length = 0;
    for (int64_t i = 0; i < num_seqs; ++i) {
      length = std::max<int64_t>(length, indptr[i + 1] - indptr[i]);
    }
    return length;
  };
  if (metadata.max_seq_len() == 0) {
    metadata.max_seq_len(longest(kv));
  }
  if (metadata.max_query_len() == 0) {
    if (decode) {
      metadata.max_query_len(num_seqs > 0 ? 1 : 0);
    } else {
      metadata.max_query_len(longest(metadata.qo_indptr_host()->const_data_ptr<int32_t>()));
    }
  }
}

}  // namespace xllm_metadata
