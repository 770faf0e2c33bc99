#include "xllm_executor/metrics.h"

#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

namespace xllm_executor {

namespace {

std::string escaped(std::string_view text, bool quotes) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || (quotes && c == '"')) {
      out += '\\';
    }
    out += c == '\n' ? std::string_view("\\n") : std::string_view(&c, 1);
  }
  return out;
}

std::string number(double value) {
  if (std::isnan(value)) {
    return "NaN";
  }
  if (std::isinf(value)) {
    return value > 0 ? "+Inf" : "-Inf";
  }
  std::array<char, 32> text{};  // the shortest text that reads back as the same double
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

}  // namespace

std::string prometheus_text(const std::vector<Metric>& metrics, const std::map<std::string, std::string>& labels) {
  std::string text;
  std::map<std::string, std::vector<const Metric*>> by_name;  // the format wants a name's samples together
  std::vector<const std::string*> order;
  for (const Metric& metric : metrics) {
    auto& samples = by_name[metric.name];
    if (samples.empty()) {
      order.push_back(&metric.name);
    }
    samples.push_back(&metric);
  }
  for (const std::string* name : order) {
    const auto& samples = by_name[*name];
    text += "# HELP " + *name + " " + escaped(samples.front()->help, false) + "\n";
    text += "# TYPE " + *name + (samples.front()->kind == MetricKind::kCounter ? " counter\n" : " gauge\n");
    for (const Metric* sample : samples) {
      auto all = sample->labels;
      all.insert(labels.begin(), labels.end());
      std::string list;
      for (const auto& [key, value] : all) {
        list += (list.empty() ? "" : ",") + key + "=\"" + escaped(value, true) + "\"";
      }
      text += *name + (list.empty() ? "" : "{" + list + "}") + " " + number(sample->value) + "\n";
    }
  }
  return text;
}

}  // namespace xllm_executor
