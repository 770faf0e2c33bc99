// Internal: the Python view of a step's metadata. It copies nothing.
#pragma once

#include <pybind11/pybind11.h>

#include "xllm_metadata/attention_metadata.h"

namespace xllm_executor {

using xllm_metadata::AttentionMetadata;

// A Python view of a step's metadata during one call. Its attributes are the properties of AttentionMetadata and
// q_cu_seq_lens, an alias of qo_indptr. After this object is destroyed, a view that Python kept raises RuntimeError.
// Construct and destroy it with the GIL held.
class MetadataView {
 public:
  explicit MetadataView(const AttentionMetadata& metadata);
  ~MetadataView();
  MetadataView(const MetadataView&) = delete;
  MetadataView& operator=(const MetadataView&) = delete;

  [[nodiscard]] pybind11::handle handle() const noexcept { return object_; }

 private:
  pybind11::object object_;
};

}  // namespace xllm_executor
