#include "steps_in_flight.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace xllm_worker {

const Batch& StepsInFlight::hold(Batch batch) {
  // On a CPU a step is complete when its call returns.
  const auto has_passed = [&](const Step& step) { return device_.is_cpu() || (step.passed && step.passed->query()); };
  const auto last = std::find_if(steps_.rbegin(), steps_.rend(), has_passed);
  steps_.erase(steps_.begin(), last.base());
  return steps_.emplace_back(Step{std::move(batch), std::nullopt}).batch;
}

void StepsInFlight::mark() {
  if (device_.is_cpu()) return;
  c10::Event& passed = steps_.back().passed.emplace(device_.type());
  passed.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

}  // namespace xllm_worker
