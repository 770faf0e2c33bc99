// Holds a request and the state of its sequence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xllm_worker {

struct Request {
  std::string id;
  int64_t line = 0;  // of stdin, from 1
  std::vector<int32_t> token_ids;
  int64_t max_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool show_logits = false;
};

struct Sequence {
  explicit Sequence(Request from)
      : request(std::move(from)),
        tokens(request.token_ids),
        num_prompt_tokens(static_cast<int64_t>(tokens.size())) {}

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_generated() const { return num_tokens() - num_prompt_tokens; }
  // Tokens whose keys and values are not in the cache yet. 1 while decoding.
  int64_t num_pending() const { return num_tokens() - num_cached; }

  Request request;
  std::vector<int32_t> tokens;  // prompt, then answer
  int64_t num_prompt_tokens;
  int64_t num_cached = 0;
  bool has_started = false;  // was scheduled before; it may be preempted now
  std::vector<int32_t> blocks;  // pages, in order
};

// One sequence's part of a step: tokens[num_cached, num_cached + num_new) are computed.
struct ScheduledSequence {
  Sequence* sequence;
  int64_t num_new;

  // The step computes the sequence's last token, whose logits give the next one.
  bool needs_token() const { return num_new == sequence->num_pending(); }
};

}  // namespace xllm_worker
