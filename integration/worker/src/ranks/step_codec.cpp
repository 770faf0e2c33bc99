#include "ranks/step_codec.h"

#include <cstring>
#include <stdexcept>

namespace xllm_worker {

namespace {

// Header of an entry: num_cached, wants_logits, state_slot, number of new tokens, of pages, and of further KV cache
// groups. Tokens and pages follow, and for each group the number of its pages and the pages.
constexpr size_t kEntryHeader = 6;

}  // namespace

std::string encode_step(std::span<const BatchEntry> entries) {
  std::vector<int32_t> numbers;
  for (const BatchEntry& entry : entries) {
    numbers.insert(numbers.end(),
                   {static_cast<int32_t>(entry.num_cached),
                    entry.wants_logits ? 1 : 0,
                    entry.state_slot,
                    static_cast<int32_t>(entry.new_tokens.size()),
                    static_cast<int32_t>(entry.blocks.size()),
                    static_cast<int32_t>(entry.group_blocks.size())});
    numbers.insert(numbers.end(), entry.new_tokens.begin(), entry.new_tokens.end());
    numbers.insert(numbers.end(), entry.blocks.begin(), entry.blocks.end());
    for (const std::span<const int32_t> table : entry.group_blocks) {
      numbers.push_back(static_cast<int32_t>(table.size()));
      numbers.insert(numbers.end(), table.begin(), table.end());
    }
  }
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int32_t)};
}

DecodedStep::DecodedStep(std::string_view bytes) : numbers_(bytes.size() / sizeof(int32_t)) {
  std::memcpy(numbers_.data(), bytes.data(), numbers_.size() * sizeof(int32_t));
  std::span<const int32_t> rest = numbers_;
  const auto take = [&](size_t count) {
    if (rest.size() < count) throw std::runtime_error("a step frame from rank 0 is truncated");
    const std::span<const int32_t> taken = rest.first(count);
    rest = rest.subspan(count);
    return taken;
  };
  while (!rest.empty()) {
    const std::span<const int32_t> header = take(kEntryHeader);
    BatchEntry entry;
    entry.num_cached = header[0];
    entry.wants_logits = header[1] != 0;
    entry.state_slot = header[2];
    entry.new_tokens = take(static_cast<size_t>(header[3]));
    entry.blocks = take(static_cast<size_t>(header[4]));
    for (int32_t group = 0; group < header[5]; ++group) {
      entry.group_blocks.push_back(take(static_cast<size_t>(take(1)[0])));
    }
    entries_.push_back(entry);
  }
}

}  // namespace xllm_worker
