// The model that runs in embedded Python: start of the interpreter, loading, the KV cache, one execute call a step.
#pragma once

#include <memory>

#include "options.h"
#include "protocol.h"
#include "step_model.h"

namespace xllm::worker {

// A model that is ready for its first step.
struct ServedModel {
  std::unique_ptr<StepModel> model;
  ServerFacts facts;
};

// Throws std::exception with a message for the user: no such checkpoint, device, architecture, ...
ServedModel load_python_model(const WorkerOptions& options);

}  // namespace xllm::worker
