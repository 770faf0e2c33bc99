/// @file
/// `Config`: the options of a PyExecutor.
#pragma once

#include <cstdint>
#include <string>

namespace xllm_executor {

/// The fields of Python's `xllm_executor.ExecutorConfig`, whose docstring has the details. Python checks the values.
struct Config {
  /// How steps are captured: "off" (eager), "cudagraphs" (full CUDA graphs for decode, piecewise ones for other steps),
  /// "piecewise" (for every step), the name of a graph runtime such as "recorded", or of a torch.compile backend.
  std::string python_graph_backend = "off";
  /// The graph runtime of "piecewise"; empty means CUDA graphs.
  std::string graph_runtime = {};
  /// Numbers of sequences to capture decode graphs for, such as "1,2,4,8"; empty means the default ones.
  std::string graph_buckets = {};
  /// Largest number of tokens in a piecewise graph. Larger steps run eagerly. 0: 8192, and 128 on a CPU.
  int64_t graph_token_budget = 0;
  /// Comma-separated names of ops that cannot be captured; piecewise graphs are split at them.
  std::string graph_cut_ops = {};
  /// Splits piecewise graphs at every collective, for a process group that cannot be captured, such as gloo on CUDA.
  bool graph_cut_collectives = false;
  /// Whether decode graphs compute the logits; false for a host that asks for hidden states.
  bool logits_in_graph = true;
  /// Refuse a step that no graph can run, when graphs are enabled.
  bool eager_is_error = false;
  /// Show the warm-up's progress on stderr: a bar on a terminal, else a line every two seconds and at the end.
  bool progress = false;
  /// Attention backend, such as "flashinfer", "decode=triton,prefill=flashinfer", or "auto", which chooses per step.
  std::string attention_backend = "auto";
  /// Whether the host gives each KV cache group a page table of its own, to free the pages of sliding windows.
  bool kv_groups = false;
  /// Largest number of tokens in a step.
  int64_t max_tokens_per_batch = 8192;
  /// Largest KV length of a sequence; 0: the length that the model was loaded for, or else its
  /// max_position_embeddings.
  int64_t max_model_len = 0;
  /// Check every step's metadata against the contract, for debugging: it synchronizes with the device.
  bool validate = false;
};

/// Calls visitor(name, value) for every option, in the order of declaration. `ConfigType` is Config or const Config.
template <class ConfigType, class Visitor>
void for_each_option(ConfigType& config, Visitor&& visitor) {
  visitor("python_graph_backend", config.python_graph_backend);
  visitor("graph_runtime", config.graph_runtime);
  visitor("graph_buckets", config.graph_buckets);
  visitor("graph_token_budget", config.graph_token_budget);
  visitor("graph_cut_ops", config.graph_cut_ops);
  visitor("graph_cut_collectives", config.graph_cut_collectives);
  visitor("logits_in_graph", config.logits_in_graph);
  visitor("eager_is_error", config.eager_is_error);
  visitor("progress", config.progress);
  visitor("attention_backend", config.attention_backend);
  visitor("kv_groups", config.kv_groups);
  visitor("max_tokens_per_batch", config.max_tokens_per_batch);
  visitor("max_model_len", config.max_model_len);
  visitor("validate", config.validate);
}

}  // namespace xllm_executor
