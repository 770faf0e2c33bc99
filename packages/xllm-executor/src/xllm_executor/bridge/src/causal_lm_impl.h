// Internal: the state of a PyCausalLM.
#pragma once

#include "python_object.h"
#include "xllm_executor/causal_lm.h"

namespace xllm_executor {

using xllm_metadata::ModelArgs;
using xllm_metadata::ParallelArgs;

struct PyCausalLM::Impl {
  // Reads the model's configuration, dtype, device and cache specs. Needs the GIL.
  static std::unique_ptr<Impl> make(pybind11::object model, const ParallelArgs& parallel);

  PythonObject model;
  ParallelArgs parallel;
  ModelArgs args;
  at::ScalarType dtype = at::ScalarType::Float;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::vector<std::vector<CacheSpec>> cache_specs;
};

}  // namespace xllm_executor
