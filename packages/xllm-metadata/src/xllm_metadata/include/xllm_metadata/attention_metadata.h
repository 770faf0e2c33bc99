/// @file
/// Metadata of one step, built by the C++ framework. `python -m xllm_metadata --fields` documents every field.
/// The bridge compares this struct with that table when it starts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "xllm_metadata/property.h"

namespace xllm_metadata {

/// T tokens, B sequences, P pages, R data-parallel ranks, W pages of the longest sequence, G KV cache groups with page
/// tables of their own. Tensors are contiguous, and int32 unless noted. A field marked "unless decode" is std::nullopt in a decode step. The struct holds references to
/// the tensors. Their memory must stay alive and unmodified until the stream that executes the step has passed it.
struct AttentionMetadata {
  XLLM_METADATA_REFLECT();

  XLLM_METADATA_PROPERTY(at::Tensor, slot_mapping);                           ///< [T], device
  XLLM_METADATA_PROPERTY(at::Tensor, paged_kv_indptr);                        ///< [B + 1], device
  XLLM_METADATA_PROPERTY(at::Tensor, paged_kv_indices);                       ///< [P], device
  XLLM_METADATA_PROPERTY(at::Tensor, paged_kv_last_page_len);                 ///< [B], device
  XLLM_METADATA_PROPERTY(at::Tensor, kv_cu_seq_lens);                         ///< [B + 1], device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, qo_indptr);               ///< [B + 1], device, unless decode
  XLLM_METADATA_PROPERTY(at::Tensor, kv_seq_lens_host);                       ///< [B + 1], host, cumulative
  XLLM_METADATA_PROPERTY(at::Tensor, paged_kv_indptr_host);                   ///< [B + 1], host
  XLLM_METADATA_PROPERTY(at::Tensor, paged_kv_last_page_len_host);            ///< [B], host
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, qo_indptr_host);          ///< [B + 1], host, unless decode
  XLLM_METADATA_PROPERTY(int64_t, max_query_len) = 0;
  XLLM_METADATA_PROPERTY(int64_t, max_seq_len) = 0;
  XLLM_METADATA_PROPERTY(bool, is_prefill) = false;
  XLLM_METADATA_PROPERTY(bool, is_chunked_prefill) = false;

  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, block_table);             ///< [B, W], device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, kv_seq_lens);             ///< [B], device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, q_seq_lens);              ///< [B], device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, linear_state_indices);    ///< [B], device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, linear_state_write_indices);  ///< [B], device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, has_initial_state);       ///< [B] bool, device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, dp_token_counts);         ///< [R], host
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, dp_is_decode);            ///< [R] bool, host
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, group_slot_mapping);      ///< [G, T], device
  XLLM_METADATA_PROPERTY(std::optional<at::Tensor>, group_paged_kv_indices);  ///< [G, P], device
};

}  // namespace xllm_metadata
