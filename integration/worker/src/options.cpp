#include "options.h"

#include <set>

#include "option_table.h"

namespace xllm_worker {

namespace {

[[noreturn]] void contradict(const std::string& message) { throw OptionError(message); }

void check_together(const WorkerOptions& options) {
  if (options.model.empty()) contradict("--model is required: a checkpoint directory with config.json");
  if (options.num_blocks && options.kv_cache_memory) {
    contradict("--num_blocks and --kv_cache_memory both size the KV cache; give one");
  }
  if (options.max_tokens_per_batch < options.max_seqs_per_batch) {
    contradict("--max_tokens_per_batch is " + std::to_string(options.max_tokens_per_batch) +
               "; it must be at least --max_seqs_per_batch, " + std::to_string(options.max_seqs_per_batch) +
               ", so that every running sequence gets its token in each step");
  }
  const bool is_native = options.model_impl == "native";
  if (is_native && options.kv_cache_dtype != "auto") {
    contradict("--kv_cache_dtype=" + options.kv_cache_dtype + " needs --model_impl=python");
  }
  if (options.enable_graph && !is_native) {
    contradict("--enable_graph=true needs --model_impl=native; with --model_impl=python use --python_graph_backend");
  }
  if (options.python_graph_backend != "off" && is_native) {
    contradict("--python_graph_backend=" + options.python_graph_backend +
               " needs --model_impl=python; with --model_impl=native use --enable_graph");
  }
  if (options.enable_kv_groups && is_native) {
    contradict("--enable_kv_groups=true needs --model_impl=python; the native model has one page table for all layers");
  }
  parse_device(options);
}

// Reads the command line into `options`; returns the names it set.
std::set<std::string> read_command_line(const std::vector<std::string>& args, WorkerOptions& options) {
  std::set<std::string> given;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (!arg.starts_with("--")) {
      throw OptionError("unexpected argument '" + arg + "'; a value follows its flag, as in --block_size=16");
    }
    const size_t equals = arg.find('=');
    const std::string name = arg.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Option* option = find_option(name);
    if (option == nullptr) throw OptionError("unknown flag --" + name + "; --help lists all flags");
    if (!given.insert(name).second) throw OptionError("--" + name + " is given twice");

    std::string text;
    if (equals != std::string::npos) {
      text = arg.substr(equals + 1);
    } else if (option->is_bool()) {
      text = "true";
    } else if (i + 1 < args.size()) {
      text = args[++i];
    } else {
      throw OptionError("--" + name + " needs a value: " + option->expected());
    }
    option->set_from_text(options, text);
  }
  return given;
}

}  // namespace

WorkerOptions parse_options(const std::vector<std::string>& args) {
  WorkerOptions options;
  const std::set<std::string> given = read_command_line(args, options);
  if (options.help) return options;
  if (!options.config.empty()) read_config_file(options.config, given, options);
  check_together(options);
  return options;
}

std::string help_text() {
  std::string text =
      "xllm_worker: serves a language model over JSON Lines on stdin and stdout.\n\n"
      "Every flag is --name=value or --name value; a true/false flag alone means true.\n"
      "The keys of a --config file are the same names. Command line > file > default.\n";
  for (const Option& option : option_table()) {
    text += "\n  --" + std::string(option.name) + "  (" + option.expected() + "; default: " + option.default_text() +
            ")\n      " + std::string(option.help) + "\n";
  }
  return text;
}

DeviceChoice parse_device(const WorkerOptions& options) {
  DeviceChoice choice;
  const std::string& device = options.device;
  if (device == "cpu") {
    choice.kind = DeviceChoice::Kind::kCpu;
    if (options.device_id) contradict("--device_id is the index of a CUDA device; it contradicts --device=cpu");
    return choice;
  }
  if (device.starts_with("cuda")) {
    choice.kind = DeviceChoice::Kind::kCuda;
    if (device.size() > 4) {
      const std::string digits = device.substr(device[4] == ':' ? 5 : 4);
      const bool is_number = device[4] == ':' && !digits.empty() && digits.size() <= 3 &&
                             digits.find_first_not_of("0123456789") == std::string::npos;
      if (!is_number) throw OptionError("--device=" + device + ": expected auto, cpu, cuda or cuda:N");
      choice.index = std::stoll(digits);
      choice.index_is_given = true;
    }
  } else if (device != "auto") {
    throw OptionError("--device=" + device + ": expected auto, cpu, cuda or cuda:N");
  }
  if (options.device_id) {
    if (choice.index_is_given && choice.index != *options.device_id) {
      contradict("--device=" + device + " and --device_id=" + std::to_string(*options.device_id) +
                 " name different devices");
    }
    choice.index = *options.device_id;
    choice.index_is_given = true;
  }
  return choice;
}

}  // namespace xllm_worker
