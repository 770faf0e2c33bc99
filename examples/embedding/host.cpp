// Generates tokens greedily for one sequence: the smallest host of a Python model.
//
//   xllm_host CHECKPOINT COUNT TOKEN_ID...
#include <ATen/ATen.h>
#include <xllm_executor/executor.h>
#include <xllm_executor/python_runtime.h>
#include <xllm_metadata/host_mirrors.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace {

using xllm_executor::PyCausalLM;
using xllm_executor::PyExecutor;
using xllm_executor::PythonRuntime;
using xllm_executor::StepInput;

constexpr int32_t kPageSize = 16;

// A tensor of one step. A host that serves would reuse pinned buffers.
at::Tensor int32_on(c10::Device device, const std::vector<int32_t>& values) {
  return at::tensor(values, at::TensorOptions().dtype(at::kInt)).to(device);
}

// The cache tensors that each layer needs. The host owns them. A model with state layers needs num_slots, too.
std::vector<std::vector<at::Tensor>> make_caches(const PyCausalLM& model, int64_t num_pages) {
  std::vector<std::vector<at::Tensor>> caches;
  for (const auto& layer : model.cache_specs()) {
    caches.emplace_back();
    for (const auto& spec : layer) {
      const auto shape = spec.tensor_shape({.num_pages = num_pages, .page_size = kPageSize});
      caches.back().push_back(at::zeros(shape, at::TensorOptions().dtype(spec.dtype).device(model.device())));
    }
  }
  return caches;
}

// A step that computes tokens [start, tokens.size()) of the only sequence, whose pages are 0, 1, 2, ... in order. With
// one new token it is a decode step, otherwise a prefill step.
StepInput make_step(const std::vector<int32_t>& tokens, int32_t start, c10::Device device) {
  const auto length = static_cast<int32_t>(tokens.size());
  const int32_t num_pages = (length + kPageSize - 1) / kPageSize;
  std::vector<int32_t> slots;
  std::vector<int32_t> pages;
  for (int32_t i = start; i < length; ++i) slots.push_back(i);
  for (int32_t page = 0; page < num_pages; ++page) pages.push_back(page);

  StepInput step;
  step.tokens = int32_on(device, {tokens.begin() + start, tokens.end()});
  step.positions = int32_on(device, slots);  // of this sequence, slot and position are equal
  step.logits_indices = int32_on(device, {length - start - 1});
  step.metadata.slot_mapping(int32_on(device, slots))
      .paged_kv_indptr(int32_on(device, {0, num_pages}))
      .paged_kv_indices(int32_on(device, pages))
      .paged_kv_last_page_len(int32_on(device, {(length - 1) % kPageSize + 1}))
      .kv_cu_seq_lens(int32_on(device, {0, length}))
      .kv_seq_lens_host(int32_on(at::kCPU, {0, length}));
  if (start == 0) {
    step.metadata.is_prefill(true).qo_indptr(int32_on(device, {0, length}));
  }
  xllm_metadata::complete_host_mirrors(step.metadata, kPageSize);
  return step;
}

int generate(const std::string& checkpoint, int32_t count, std::vector<int32_t> tokens) {
  const char* device = std::getenv("XLLM_DEVICE");
  const PyCausalLM model = PyCausalLM::load({.model_path = checkpoint, .device = device != nullptr ? device : "cpu"});
  PyExecutor executor(model, {.python_graph_backend = model.device().is_cuda() ? "cudagraphs" : "off"},
                      /*max_seqs_per_batch=*/1);
  const auto max_length = static_cast<int64_t>(tokens.size()) + count;
  executor.bind_kv_caches(make_caches(model, (max_length + kPageSize - 1) / kPageSize));
  executor.warmup();
  int32_t start = 0;
  for (int32_t i = 0; i < count; ++i) {
    const at::Tensor logits = executor.execute(make_step(tokens, start, model.device())).logits;
    start = static_cast<int32_t>(tokens.size());
    tokens.push_back(logits.argmax(-1).item<int32_t>());
    std::printf("%d\n", tokens.back());
  }
  std::fprintf(stderr, "%s", xllm_executor::prometheus_text(executor.metrics()).c_str());
  executor.shutdown();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s CHECKPOINT COUNT TOKEN_ID...\n", argv[0]);
    return 2;
  }
  try {
    PythonRuntime::start();
    std::vector<int32_t> tokens;
    for (int i = 3; i < argc; ++i) tokens.push_back(std::stoi(argv[i]));
    return generate(argv[1], std::stoi(argv[2]), tokens);
  } catch (const xllm_executor::RefusedStep& error) {  // the host's own mistake, or a request beyond the limits
    std::fprintf(stderr, "refused: %s\n", error.message().c_str());
  } catch (const xllm_executor::OutOfMemory& error) {
    std::fprintf(stderr, "out of memory: %s\n", error.message().c_str());
  } catch (const xllm_executor::PythonError& error) {
    std::fprintf(stderr, "%s", error.traceback().c_str());
  } catch (const std::exception& error) {  // EnvironmentError and InterpreterEnded among them
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}
