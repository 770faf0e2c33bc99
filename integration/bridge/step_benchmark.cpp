// Measures the cost of one step from C++ to Python, and of a plain pybind11 call in the same run.
//
//   step_benchmark EXECUTABLE [STEPS] [REPEATS] [DEVICE]
//
// baseline: a pybind11 call of a Python function with two tensors that Python has not seen yet.
// step: PyExecutor::execute with an executor in Python that reads every core field and does nothing else; tokens,
// positions, indices and all metadata tensors are new to Python in each step, and so is the view.
// Both take the GIL per call, as a host's thread does. The tensors are on DEVICE, except the host mirrors. Tensors are
// made outside of the timed part: making them is the host's cost whatever it calls. Prints one JSON object.
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <pybind11/embed.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "xllm_executor/executor.h"
#include "xllm_executor/python_runtime.h"

namespace py = pybind11;

namespace {

using xllm_executor::PyCausalLM;
using xllm_executor::PyExecutor;
using xllm_executor::StepInput;

// The names of a real executor and a real model, so that the path through the bridge is the real one.
constexpr const char* kTrivial = R"(
import types
import torch
import xllm_executor
import xllm_models

class Config:
    def to_model_args(self):
        return {"model_type": "trivial"}

def load_model(path, **options):
    return types.SimpleNamespace(
        config=Config(), cache_specs=[], dtype=torch.float32, device=torch.device(options["device"]))

class ModelExecutor:
    def __init__(self, model, config, max_seqs_per_batch):
        pass

    def execute(self, tokens, positions, metadata, logits_indices=None):
        metadata.slot_mapping
        metadata.paged_kv_indptr
        metadata.paged_kv_indices
        metadata.paged_kv_last_page_len
        metadata.kv_cu_seq_lens
        metadata.qo_indptr
        metadata.kv_seq_lens_host
        metadata.paged_kv_indptr_host
        metadata.paged_kv_last_page_len_host
        metadata.qo_indptr_host
        metadata.max_query_len
        metadata.max_seq_len
        metadata.is_prefill
        metadata.is_chunked_prefill
        return tokens

xllm_models.load_model = load_model
xllm_executor.ModelExecutor = ModelExecutor

def baseline(tokens, positions):
    return tokens
)";

at::Tensor fresh(c10::Device device = at::kCPU) {
  return at::empty({8}, at::TensorOptions().dtype(at::kInt).device(device));
}

std::vector<StepInput> make_steps(int64_t count, bool decode, c10::Device device) {
  std::vector<StepInput> steps(static_cast<std::size_t>(count));
  for (StepInput& step : steps) {
    step.tokens = fresh(device);
    step.positions = fresh(device);
    step.logits_indices = fresh(device);
    step.metadata.slot_mapping(fresh(device))
        .paged_kv_indptr(fresh(device))
        .paged_kv_indices(fresh(device))
        .paged_kv_last_page_len(fresh(device))
        .kv_cu_seq_lens(fresh(device))
        .kv_seq_lens_host(fresh())
        .paged_kv_indptr_host(fresh())
        .paged_kv_last_page_len_host(fresh())
        .max_query_len(1)
        .max_seq_len(8);
    if (!decode) {
      step.metadata.qo_indptr(fresh(device)).qo_indptr_host(fresh()).is_chunked_prefill(true);
    }
  }
  return steps;
}

// Mean time of a call over `count` steps. Inputs are made a few at a time and right before their calls, as a host makes
// them: thousands at once would measure how a cold cache reads tensors.
template <class Call>
double microseconds_each(int64_t count, bool decode, c10::Device device, Call&& call) {
  constexpr int64_t kBatch = 8;
  std::chrono::duration<double, std::micro> elapsed{};
  for (int64_t done = 0; done < count; done += kBatch) {
    const std::vector<StepInput> inputs = make_steps(kBatch, decode, device);
    const auto start = std::chrono::steady_clock::now();
    for (const StepInput& step : inputs) {
      call(step);
    }
    elapsed += std::chrono::steady_clock::now() - start;
  }
  return elapsed.count() / static_cast<double>((count + kBatch - 1) / kBatch * kBatch);
}

// Counts what torch allocates for tensors on this thread while it lives.
class AllocationCounter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { count_ += size > 0 ? 1 : 0; }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
  [[nodiscard]] int64_t count() const noexcept { return count_; }

 private:
  int64_t count_ = 0;
};

int64_t allocations_in(const std::function<void()>& call) {
  const auto counter = std::make_shared<AllocationCounter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
  call();
  return counter->count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 2000;
  const int64_t repeats = argc > 3 ? std::stoll(argv[3]) : 5;
  const c10::Device device(argc > 4 ? argv[4] : "cpu");
  xllm_executor::PythonRuntime::start({.executable = argc > 1 ? argv[1] : ""});
  py::object function;
  {
    const py::gil_scoped_acquire gil;
    py::dict globals;
    globals["__builtins__"] = py::module_::import("builtins");
    py::exec(kTrivial, globals);
    function = globals["baseline"];
  }
  const PyCausalLM model = PyCausalLM::load({.model_path = "none", .device = device.str()});
  PyExecutor executor(model, {}, 1);

  std::vector<double> baseline;
  std::vector<double> decode;
  std::vector<double> mixed;
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    baseline.push_back(microseconds_each(steps, true, device, [&](const StepInput& step) {
      const py::gil_scoped_acquire gil;
      (void)function(step.tokens, step.positions).cast<at::Tensor>();
    }));
    for (std::vector<double>* times : {&decode, &mixed}) {
      times->push_back(microseconds_each(steps, times == &decode, device, [&](const StepInput& step) {
        (void)executor.execute(step);
      }));
    }
  }
  const std::vector<StepInput> inputs = make_steps(1, false, device);
  const int64_t allocations = allocations_in([&] { (void)executor.execute(inputs[0]); });
  const int64_t allocations_of_one_tensor = allocations_in([] { (void)fresh(); });
  std::printf(
      "{\"steps\": %lld, \"repeats\": %lld, \"baseline_us\": %.3f, \"decode_step_us\": %.3f, \"mixed_step_us\": %.3f, "
      "\"decode_ratio\": %.2f, \"mixed_ratio\": %.2f, \"allocations_per_step\": %lld, \"allocations_of_one_tensor\": %lld}\n",
      static_cast<long long>(steps), static_cast<long long>(repeats), median(baseline), median(decode), median(mixed),
      median(decode) / median(baseline), median(mixed) / median(baseline),
      static_cast<long long>(allocations), static_cast<long long>(allocations_of_one_tensor));
  std::fflush(stdout);
  const py::gil_scoped_acquire gil;
  function = py::object();
  return 0;
}
