// A host inside xLLM's namespace: it uses the framework's structs and the bridge's in one translation unit.
//
//   names_host MODEL_DIR EXECUTABLE
#include "xllm_like.h"  // first: the bridge's headers must not depend on the names that it defines

#include <xllm_executor/executor.h>
#include <xllm_executor/native_state.h>
#include <xllm_executor/python_runtime.h>
#include <xllm_executor/tensor_parallel.h>
#include <xllm_metadata/host_mirrors.h>

#include <cstdio>
#include <string>

namespace xllm {

namespace {

// A struct of the host with the framework's macro, after the bridge's headers.
struct HostState {
  PROPERTY(std::string, name) = "host";
};

std::string describe(const ModelArgs& args, const ParallelArgs& parallel, const AttentionMetadata& metadata) {
  return std::to_string(args.model_type()) + " " + args.architectures().at(0) + " " + args.dtype() + " " +
         std::to_string(parallel.world_size()) + " " + std::to_string(parallel.ranks().size()) + " " +
         std::to_string(metadata.slot_mapping().at(1));
}

int run(const std::string& model_path, const std::string& executable) {
  const ModelArgs args = make_model_args();
  const ParallelArgs parallel = make_parallel_args();
  const AttentionMetadata metadata;
  const std::string before = describe(args, parallel, metadata);

  xllm_executor::PythonRuntime::start({.executable = executable});
  xllm_metadata::ParallelArgs one_rank;
  const auto model = xllm_executor::PyCausalLM::load({.model_path = model_path}, one_rank);
  const xllm_metadata::ModelArgs copy = model.args();
  std::printf("{\"bridge\": \"%s %lld\", \"before\": \"%s\", \"after\": \"%s\", \"own\": \"%s\"}\n",
              copy.model_type().c_str(), static_cast<long long>(copy.n_layers()), before.c_str(),
              describe(make_model_args(), parallel, metadata).c_str(), HostState().name().c_str());
  return 0;
}

}  // namespace

}  // namespace xllm

int main(int argc, char** argv) { return argc == 3 ? xllm::run(argv[1], argv[2]) : 2; }
