#include "option_table.h"

#include <charconv>
#include <fstream>
#include <type_traits>

#include "strict_json.h"

namespace xllm_worker {

using nlohmann::json;

namespace {

constexpr int64_t kMaxCount = 1 << 24;

std::vector<Option> make_table() {
  using O = WorkerOptions;
  return {
      {.name = "model", .member = &O::model, .help = "Checkpoint directory: config.json and safetensors files."},
      {.name = "model_impl",
       .member = &O::model_impl,
       .help = "Which implementation runs the model.",
       .choices = {"python", "native"}},
      {.name = "python_executable",
       .member = &O::python_executable,
       .help = "The Python whose environment the embedded interpreter uses. Empty: the Python of the build."},
      {.name = "python_model_path",
       .member = &O::python_model_path,
       .help = "Folders to prepend to Python's sys.path, separated by colons."},
      {.name = "python_graph_backend",
       .member = &O::python_graph_backend,
       .help = "Graph runtime of the Python model: off, or the name of a registered runtime."},
      {.name = "enable_graph",
       .member = &O::enable_graph,
       .help = "Pads the native model's steps to the bucket sizes of the Python model's graphs."},
      {.name = "device", .member = &O::device, .help = "auto, cpu, cuda or cuda:N. auto: CUDA if available, else cpu."},
      {.name = "device_id",
       .member = &O::device_id,
       .help = "Index of the CUDA device.",
       .unset = "0",
       .max = 127},
      {.name = "dtype",
       .member = &O::dtype,
       .help = "Dtype of weights and activations. auto: the checkpoint's dtype.",
       .choices = {"auto", "float32", "bfloat16", "float16"}},
      {.name = "kv_cache_dtype",
       .member = &O::kv_cache_dtype,
       .help = "Dtype of the KV cache. auto: that of the weights. fp8_e4m3 takes the checkpoint's scales, or 1.0.",
       .choices = {"auto", "fp8_e4m3"}},
      {.name = "max_seqs_per_batch",
       .member = &O::max_seqs_per_batch,
       .help = "Maximum number of running sequences.",
       .min = 1,
       .max = 4096},
      {.name = "max_tokens_per_batch",
       .member = &O::max_tokens_per_batch,
       .help = "Maximum number of tokens per step; longer prompts are computed in chunks.",
       .min = 1,
       .max = kMaxCount},
      {.name = "max_mixed_prefill_tokens",
       .member = &O::max_mixed_prefill_tokens,
       .help = "Maximum number of prompt tokens in a step that also decodes. Bounds the gap between decodes.",
       .min = 1,
       .max = kMaxCount},
      {.name = "max_queued_requests",
       .member = &O::max_queued_requests,
       .help = "Maximum number of requests that wait to run; more are refused.",
       .min = 1,
       .max = kMaxCount},
      {.name = "block_size", .member = &O::block_size, .help = "Tokens per KV page.", .min = 1, .max = 1024},
      {.name = "enable_prefix_cache",
       .member = &O::enable_prefix_cache,
       .help = "Reuses the KV pages of earlier requests that begin with the same tokens; evicts the least recently used."},
      {.name = "enable_kv_groups",
       .member = &O::enable_kv_groups,
       .help = "Gives sliding-window layers pages of their own, and frees those that have left the window. Turns the "
               "prefix cache off for models with such layers."},
      {.name = "num_blocks",
       .member = &O::num_blocks,
       .help = "Number of KV cache pages.",
       .unset = "from kv_cache_memory",
       .min = 1,
       .max = kMaxCount},
      {.name = "kv_cache_memory",
       .member = &O::kv_cache_memory,
       .help = "Memory of the KV cache, at most what max_seqs_per_batch sequences of max_model_len need.",
       .unset = "1GiB",
       .min = 1},
      {.name = "max_model_len",
       .member = &O::max_model_len,
       .help = "Maximum sequence length, prompt and answer together. It selects the rotary factors of longrope models.",
       .unset = "the model's max_position_embeddings",
       .min = 2,
       .max = kMaxCount},
      {.name = "tp_size",
       .member = &O::tp_size,
       .help = "Number of tensor-parallel ranks, one process each. Without --tp_rank, this is rank 0 and starts the others.",
       .unset = "1, or torchrun's WORLD_SIZE",
       .min = 1,
       .max = 1024},
      {.name = "tp_rank",
       .member = &O::tp_rank,
       .help = "Rank of this process, when every rank is started by hand. Rank 0 serves the requests.",
       .unset = "0, or torchrun's RANK",
       .max = 1023},
      {.name = "tp_host",
       .member = &O::tp_host,
       .help = "Host of rank 0's store, where the ranks rendezvous.",
       .unset = "127.0.0.1, or torchrun's MASTER_ADDR"},
      {.name = "tp_port",
       .member = &O::tp_port,
       .help = "Port of rank 0's store, where the ranks rendezvous.",
       .unset = "a free one, or torchrun's MASTER_PORT",
       .min = 1,
       .max = 65535},
      {.name = "tp_backend",
       .member = &O::tp_backend,
       .help = "Backend of the collectives. auto: nccl on CUDA devices, gloo on others.",
       .choices = {"auto", "gloo", "nccl"}},
      {.name = "tp_start_timeout",
       .member = &O::tp_start_timeout,
       .help = "Time limit in seconds for all ranks to connect, and again for all to load the model.",
       .min = 1,
       .max = 86400},
      {.name = "tp_timeout",
       .member = &O::tp_timeout,
       .help = "Time limit in seconds for one step, and for the next heartbeat of a rank; after it, all ranks end.",
       .min = 1,
       .max = 86400},
      {.name = "config",
       .member = &O::config,
       .help = "A JSON file with an object of these options.",
       .only_on_command_line = true},
      {.name = "help", .member = &O::help, .help = "Print this text.", .only_on_command_line = true},
  };
}

std::string join(const std::vector<std::string_view>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

std::optional<int64_t> parse_int(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// An integer with an optional binary unit: "4096", "512MiB".
std::optional<int64_t> parse_bytes(std::string_view text) {
  int64_t unit = 1;
  constexpr std::pair<std::string_view, int> kUnits[] = {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  for (const auto& [suffix, shift] : kUnits) {
    if (text.ends_with(suffix)) {
      text.remove_suffix(suffix.size());
      unit = int64_t{1} << shift;
      break;
    }
  }
  const auto number = parse_int(text);
  if (!number || *number < 0 || *number > std::numeric_limits<int64_t>::max() / unit) return std::nullopt;
  return *number * unit;
}

// The source and spelling of a value, for error messages.
struct Spelling {
  std::string source;  // "--block_size=abc" or "options.json: block_size is \"abc\""

  [[noreturn]] void refuse(const Option& option) const {
    throw OptionError(source + ": expected " + option.expected());
  }
};

void store(const Option& option, WorkerOptions& options, int64_t value, const Spelling& spelling) {
  if (value < option.min || value > option.max) spelling.refuse(option);
  std::visit(
      [&](auto member) {
        using T = std::remove_reference_t<decltype(options.*member)>;
        if constexpr (std::is_same_v<T, std::optional<ByteSize>>) {
          options.*member = ByteSize{value};
        } else if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, std::optional<int64_t>>) {
          options.*member = value;
        }
      },
      option.member);
}

void store(const Option& option, WorkerOptions& options, const std::string& value, const Spelling& spelling) {
  if (!option.choices.empty()) {
    bool found = false;
    for (const std::string_view choice : option.choices) found = found || choice == value;
    if (!found) spelling.refuse(option);
  }
  options.*std::get<std::string WorkerOptions::*>(option.member) = value;
}

enum class Type { kString, kBool, kInt, kBytes };

Type type_of(const Option& option) {
  if (std::holds_alternative<std::string WorkerOptions::*>(option.member)) return Type::kString;
  if (option.is_bool()) return Type::kBool;
  if (std::holds_alternative<std::optional<ByteSize> WorkerOptions::*>(option.member)) return Type::kBytes;
  return Type::kInt;
}

void set_from_json(const Option& option, WorkerOptions& options, const json& value, const std::string& path) {
  const Spelling spelling{path + ": " + std::string(option.name) + " is " + dump_json(value, kMaxQuoted)};
  const bool is_int = value.is_number_integer() &&
                      !(value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int64_t>::max());
  switch (type_of(option)) {
    case Type::kString:
      if (!value.is_string()) spelling.refuse(option);
      return store(option, options, value.get<std::string>(), spelling);
    case Type::kBool:
      if (!value.is_boolean()) spelling.refuse(option);
      options.*std::get<bool WorkerOptions::*>(option.member) = value.get<bool>();
      return;
    case Type::kInt:
      if (!is_int) spelling.refuse(option);
      return store(option, options, value.get<int64_t>(), spelling);
    case Type::kBytes: {
      std::optional<int64_t> bytes;
      if (is_int) bytes = value.get<int64_t>();
      if (value.is_string()) bytes = parse_bytes(value.get<std::string>());
      if (!bytes) spelling.refuse(option);
      return store(option, options, *bytes, spelling);
    }
  }
}

// The file's text. Bounded, since the path may name a device.
std::string read_text(const std::string& path) {
  constexpr size_t kMaxBytes = 1 << 20;
  std::ifstream file(path);
  if (!file) throw OptionError("--config=" + path + ": the file cannot be read");
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxBytes) {
    throw OptionError(path + ": the file has more than " + std::to_string(kMaxBytes) + " bytes, the limit for options");
  }
  return text;
}

}  // namespace

std::string Option::expected() const {
  switch (type_of(*this)) {
    case Type::kString: return choices.empty() ? "a string" : join(choices);
    case Type::kBool: return "true or false";
    case Type::kBytes: return "a size such as 1073741824, 512MiB or 4GiB";
    case Type::kInt: break;
  }
  return "an integer from " + std::to_string(min) + " to " + std::to_string(max);
}

std::string Option::default_text() const {
  static const WorkerOptions defaults;
  switch (type_of(*this)) {
    case Type::kString: {
      const std::string& text = defaults.*std::get<std::string WorkerOptions::*>(member);
      return !text.empty() ? text : unset.empty() ? "none" : std::string(unset);
    }
    case Type::kBool: return defaults.*std::get<bool WorkerOptions::*>(member) ? "true" : "false";
    default: break;
  }
  if (const auto* number = std::get_if<int64_t WorkerOptions::*>(&member)) {
    return std::to_string(defaults.*(*number));
  }
  return std::string(unset);
}

void Option::set_from_text(WorkerOptions& options, const std::string& text) const {
  const Spelling spelling{"--" + std::string(name) + "=" + text};
  switch (type_of(*this)) {
    case Type::kString: return store(*this, options, text, spelling);
    case Type::kBool:
      if (text != "true" && text != "false") spelling.refuse(*this);
      options.*std::get<bool WorkerOptions::*>(member) = text == "true";
      return;
    case Type::kInt:
    case Type::kBytes: {
      const auto value = type_of(*this) == Type::kInt ? parse_int(text) : parse_bytes(text);
      if (!value) spelling.refuse(*this);
      return store(*this, options, *value, spelling);
    }
  }
}

const std::vector<Option>& option_table() {
  static const std::vector<Option> table = make_table();
  return table;
}

const Option* find_option(std::string_view name) {
  for (const Option& option : option_table()) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

void read_config_file(const std::string& path, const std::set<std::string>& given, WorkerOptions& options) {
  const std::string text = read_text(path);
  json object;
  try {
    object = parse_strict_json(text);
  } catch (const JsonError& error) {
    throw OptionError(path + ": " + error.what());
  }
  if (!object.is_object()) {
    throw OptionError(path + ": expected an object of options, found " + describe_json_type(object));
  }
  for (const auto& [key, value] : object.items()) {
    const Option* option = find_option(key);
    if (option == nullptr) throw OptionError(path + ": unknown option " + dump_json(key, kMaxQuoted));
    if (option->only_on_command_line) throw OptionError(path + ": " + key + " is allowed on the command line only");
    // A value that the command line overrides is still checked.
    WorkerOptions unused;
    set_from_json(*option, given.contains(key) ? unused : options, value, path);
  }
}

}  // namespace xllm_worker
