// Internal: the Python object through which a step's metadata is read. No copy, no tensor made.
#pragma once

#include <pybind11/pybind11.h>

#include "xllm/metadata/attention_metadata.h"

namespace xllm::executor {

// A view of a step's metadata for the time of one call. Attributes are the properties of AttentionMetadata and
// q_cu_seq_lens, the other name of qo_indptr. When the guard ends, a view that Python kept raises RuntimeError.
// Construct and destroy with the GIL held.
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

}  // namespace xllm::executor
