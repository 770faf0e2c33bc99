/// @file
/// `NativeState`: the tensors of a checkpoint, loaded by Python for a model written in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "xllm_executor/causal_lm.h"
#include "xllm_metadata/model_args.h"

namespace xllm_executor {

using xllm_metadata::ModelArgs;
using xllm_metadata::ParallelArgs;

/// One layer's attention, counted on this rank.
struct AttentionLayer {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  double scale = 0;
  int64_t sliding_window = 0;     ///< keys that a query sees, its own included; 0: all
  double logits_soft_cap = 0;     ///< 0: none
};

/// A loaded checkpoint: what a C++ model needs to run it.
struct NativeState {
  ModelArgs args;
  std::vector<AttentionLayer> layers;
  /// Parameters and buffers of this rank by their names in the Python model; tied ones under every name.
  std::map<std::string, at::Tensor> tensors;
  at::ScalarType dtype = at::ScalarType::Float;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
};

/// Loads as PyCausalLM::load does, with the same errors. Throws PythonError.
[[nodiscard]] NativeState load_native_state(const LoadOptions& options, const ParallelArgs& parallel = {});

/// Per tensor of a checkpoint directory, a digest of its shape, dtype and some of its rows. It distinguishes checkpoints
/// in milliseconds and is no checksum. Throws PythonError.
[[nodiscard]] std::map<std::string, std::string> checkpoint_digests(const std::string& model_path);

}  // namespace xllm_executor
