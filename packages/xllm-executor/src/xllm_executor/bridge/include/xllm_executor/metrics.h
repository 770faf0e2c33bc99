/// @file
/// `Metric`: one sample of an executor's metrics, and their text in Prometheus' exposition format.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace xllm_executor {

/// Whether a value only grows.
enum class MetricKind {
  kCounter,  ///< grows while the executor lives
  kGauge,    ///< the present value
};

/// One sample. Samples of one name have the same kind and help text.
struct Metric {
  std::string name;                           ///< such as "xllm_executor_steps_total"
  MetricKind kind = MetricKind::kGauge;
  std::string help;                           ///< one sentence
  std::map<std::string, std::string> labels;  ///< such as {"runner", "eager"}
  double value = 0;
};

/// The samples in Prometheus' text exposition format 0.0.4, with HELP and TYPE lines. `labels` are added to every
/// sample, such as {"model", "qwen3"}; where a sample has the label itself, its own value wins.
[[nodiscard]] std::string prometheus_text(const std::vector<Metric>& metrics,
                                          const std::map<std::string, std::string>& labels = {});

}  // namespace xllm_executor
