// Holds a request and the state of its sequence.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "window_groups.h"

namespace xllm_worker {

using Clock = std::chrono::steady_clock;

struct Request {
  std::string id;
  int64_t line = 0;  // of stdin, from 1
  std::vector<int32_t> token_ids;
  int64_t max_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool show_logits = false;
  Clock::time_point arrival = Clock::now();  // when its line was read
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
  bool has_started() const { return first_scheduled.has_value(); }  // it may be preempted now
  // A prompt's last chunk of one token counts as decode too: the step is the same.
  bool is_decode() const { return num_cached > 0 && num_pending() == 1; }

  Request request;
  std::vector<int32_t> tokens;  // prompt, then answer
  int64_t num_prompt_tokens;
  int64_t num_cached = 0;
  std::vector<int32_t> blocks;  // pages, in order
  GroupTables group_blocks;     // pages of KV cache groups from 1 on; empty until it runs
  int32_t state_slot = -1;      // while it runs
  std::optional<Clock::time_point> first_scheduled;
  std::optional<Clock::time_point> first_token;
  Clock::time_point last_token;
};

// One sequence's part of a step: tokens[num_cached, num_cached + num_new) are computed.
struct ScheduledSequence {
  Sequence* sequence;
  int64_t num_new;

  // The step computes the sequence's last token, whose logits give the next one.
  bool needs_token() const { return num_new == sequence->num_pending(); }
};

}  // namespace xllm_worker
