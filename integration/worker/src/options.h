// Parses the worker's options from the command line and a JSON file. Command line > JSON file > default.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace xllm_worker {

struct ByteSize {
  int64_t bytes = 0;
};

struct WorkerOptions {
  std::string model;
  std::string model_impl = "python";
  std::string python_executable;
  std::string python_model_path;
  std::string python_graph_backend = "off";
  bool enable_graph = false;
  std::string device = "auto";
  std::optional<int64_t> device_id;
  std::string dtype = "auto";
  std::string kv_cache_dtype = "auto";
  int64_t max_seqs_per_batch = 64;
  int64_t max_tokens_per_batch = 2048;
  // vLLM's first default of max_num_batched_tokens with chunked prefill.
  int64_t max_mixed_prefill_tokens = 512;
  int64_t max_queued_requests = 4096;
  int64_t block_size = 16;
  bool enable_prefix_cache = true;
  bool enable_kv_groups = false;
  std::optional<int64_t> num_blocks;
  std::optional<ByteSize> kv_cache_memory;
  std::optional<int64_t> max_model_len;
  std::optional<int64_t> tp_size;
  std::optional<int64_t> tp_rank;
  std::string tp_host;
  std::optional<int64_t> tp_port;
  std::string tp_backend = "auto";
  int64_t tp_start_timeout = 300;
  int64_t tp_timeout = 60;
  std::string config;
  bool help = false;
};

// An unknown flag, a value of the wrong type, a value out of range, or options that contradict each other.
class OptionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// args: the command line without the program's name. Throws OptionError. Checks nothing else when --help is given.
WorkerOptions parse_options(const std::vector<std::string>& args);

std::string help_text();

// The combined meaning of --device and --device_id.
struct DeviceChoice {
  enum class Kind { kAuto, kCpu, kCuda };
  Kind kind = Kind::kAuto;
  int64_t index = 0;            // of the CUDA device
  bool index_is_given = false;  // `auto` with an index means CUDA
};

DeviceChoice parse_device(const WorkerOptions& options);

}  // namespace xllm_worker
