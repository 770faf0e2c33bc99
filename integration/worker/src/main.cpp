// xllm_worker: serves one model over JSON Lines. Exit codes: 0 done, 1 could not start or go on, 2 wrong options.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "engine.h"
#include "line_io.h"
#include "options.h"
#include "python_model.h"

namespace xllm::worker {

namespace {

int report(const std::string& message, int exit_code) {
  std::cerr << "error: " << message << std::endl;
  return exit_code;
}

void serve(const WorkerOptions& options) {
  ProtocolOutput output;
  const ServedModel served = load_python_model(options);
  const ServerFacts& facts = served.facts;
  BlockManager blocks(facts.num_blocks, facts.block_size);
  const EngineLimits limits{
      {options.max_seqs_per_batch, options.max_tokens_per_batch}, facts.max_model_len, facts.eos_token_ids};
  const RequestLimits request_limits{facts.vocab_size, facts.max_model_len, blocks.num_slots()};
  Engine engine(
      *served.model,
      blocks,
      limits,
      [&](std::string_view events) { output.write(events); },
      [](const std::string& message) { std::cerr << "a step failed: " << message << std::endl; });

  output.write(ready_event(facts));
  Inbox inbox;
  const LineReader reader(
      STDIN_FILENO,
      [&](std::string_view line, int64_t number) { inbox.put(parse_input_line(line, number, request_limits)); },
      [&] { inbox.close(); });
  engine.run(inbox);
  served.model->shutdown();
}

int run(const std::vector<std::string>& args) {
  try {
    const WorkerOptions options = parse_options(args);
    if (options.help) {
      std::cout << help_text();
      return 0;
    }
    serve(options);
    return 0;
  } catch (const OptionError& error) {
    return report(error.what(), 2);
  } catch (const std::exception& error) {
    return report(error.what(), 1);
  }
}

}  // namespace

}  // namespace xllm::worker

int main(int argc, char** argv) { return xllm::worker::run({argv + 1, argv + argc}); }
