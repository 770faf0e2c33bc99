// A translation unit of the framework that does not know the bridge.
#include "xllm_like.h"

namespace xllm {

ModelArgs make_model_args() {
  ModelArgs args;
  args.model_type(7);
  return args;
}

ParallelArgs make_parallel_args() { return {}; }

}  // namespace xllm
