#include "batch_builder.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace xllm_worker {

namespace {

// Each array is aligned to 128 bytes: kernels use wide loads, and Triton compiles a second variant for unaligned
// pointers.
constexpr int64_t kAlignment = 128 / sizeof(int32_t);

struct Section {
  int64_t begin = 0;
  int64_t size = 0;
};

// The offset and size of each array in the buffer.
struct Layout {
  Section tokens, positions, logits_indices, slot_mapping;
  Section pages_indptr, page_indices, last_page_lens, kv_indptr, qo_indptr;
  Section group_slots, group_pages;         // [num_groups, T] and [num_groups, P]; both empty without groups
  Section state_slots, has_initial_state;  // the second one holds bytes; both empty without states
  int64_t size = 0;
  int64_t max_query_len = 0;
  int64_t max_seq_len = 0;
  bool is_decode = true;   // every sequence has exactly one new token
  bool is_prefill = true;  // no sequence has cached tokens

  Section take(int64_t count) {
    const Section section{size, count};
    size = (size + count + kAlignment - 1) / kAlignment * kAlignment;
    return section;
  }
};

int64_t num_new(const BatchEntry& entry) { return std::ssize(entry.new_tokens); }
int64_t kv_len(const BatchEntry& entry) { return entry.num_cached + num_new(entry); }
int64_t num_pages(const BatchEntry& entry, int64_t block_size) { return (kv_len(entry) + block_size - 1) / block_size; }

void check_entry(const BatchEntry& entry, int64_t pages, int64_t num_groups) {
  if (entry.num_cached < 0 || std::ssize(entry.blocks) < pages) {
    throw std::logic_error("a sequence of " + std::to_string(kv_len(entry)) + " tokens needs " +
                           std::to_string(pages) + " pages and has " + std::to_string(entry.blocks.size()));
  }
  if (std::ssize(entry.group_blocks) < num_groups ||
      std::ranges::any_of(entry.group_blocks, [&](const auto& table) { return std::ssize(table) < pages; })) {
    throw std::logic_error("a sequence of " + std::to_string(kv_len(entry)) + " tokens needs " + std::to_string(pages) +
                           " pages in each of " + std::to_string(num_groups) + " KV cache groups");
  }
  if (entry.wants_logits && entry.new_tokens.empty()) {
    throw std::logic_error("logits are wanted of a sequence without new tokens");
  }
}

// The last cumulative length must fit into int32. The cache size does not bound it: shared pages count once per
// sequence.
void check_total(int64_t total_kv, int64_t num_seqs) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  if (total_kv <= kLimit) return;
  throw std::runtime_error("the KV lengths of " + std::to_string(num_seqs) + " sequences sum to " +
                           std::to_string(total_kv) + "; at most " + std::to_string(kLimit) + " fit into int32");
}

Layout make_layout(std::span<const BatchEntry> entries, int64_t block_size, bool has_states, int64_t num_groups) {
  Layout layout;
  int64_t total_new = 0, total_pages = 0, total_logits = 0, total_kv = 0;
  for (const BatchEntry& entry : entries) {
    const int64_t pages = num_pages(entry, block_size);
    check_entry(entry, pages, num_groups);
    total_new += num_new(entry);
    total_pages += pages;
    total_kv += kv_len(entry);
    total_logits += entry.wants_logits ? 1 : 0;
    layout.max_query_len = std::max(layout.max_query_len, num_new(entry));
    layout.max_seq_len = std::max(layout.max_seq_len, kv_len(entry));
    layout.is_decode = layout.is_decode && num_new(entry) == 1;
    layout.is_prefill = layout.is_prefill && entry.num_cached == 0;
  }
  layout.is_prefill = layout.is_prefill && !layout.is_decode;
  check_total(total_kv, std::ssize(entries));

  const int64_t num_seqs = std::ssize(entries);
  layout.tokens = layout.take(total_new);
  layout.positions = layout.take(total_new);
  layout.logits_indices = layout.take(total_logits);
  layout.slot_mapping = layout.take(total_new);
  layout.pages_indptr = layout.take(num_seqs + 1);
  layout.page_indices = layout.take(total_pages);
  layout.last_page_lens = layout.take(num_seqs);
  layout.kv_indptr = layout.take(num_seqs + 1);
  layout.qo_indptr = layout.take(num_seqs + 1);
  layout.group_slots = layout.take(num_groups * total_new);
  layout.group_pages = layout.take(num_groups * total_pages);
  if (has_states) {
    layout.state_slots = layout.take(num_seqs);
    layout.has_initial_state = layout.take((num_seqs + 3) / 4);
  }
  return layout;
}

void fill(int32_t* buffer, const Layout& layout, std::span<const BatchEntry> entries, int64_t block_size) {
  int32_t* token = buffer + layout.tokens.begin;
  int32_t* position = buffer + layout.positions.begin;
  int32_t* logits_index = buffer + layout.logits_indices.begin;
  int32_t* slot = buffer + layout.slot_mapping.begin;
  int32_t* pages_indptr = buffer + layout.pages_indptr.begin;
  int32_t* page = buffer + layout.page_indices.begin;
  int32_t* last_page_len = buffer + layout.last_page_lens.begin;
  int32_t* kv_indptr = buffer + layout.kv_indptr.begin;
  int32_t* qo_indptr = buffer + layout.qo_indptr.begin;
  *pages_indptr = *kv_indptr = *qo_indptr = 0;

  for (const BatchEntry& entry : entries) {
    const int64_t length = kv_len(entry);
    const int64_t pages = num_pages(entry, block_size);
    token = std::copy(entry.new_tokens.begin(), entry.new_tokens.end(), token);
    for (int64_t p = entry.num_cached; p < length; ++p) {
      *position++ = static_cast<int32_t>(p);
      *slot++ = static_cast<int32_t>(entry.blocks[static_cast<size_t>(p / block_size)] * block_size + p % block_size);
    }
    page = std::copy_n(entry.blocks.begin(), pages, page);
    *last_page_len++ = static_cast<int32_t>(length == 0 ? 0 : (length - 1) % block_size + 1);
    pages_indptr[1] = static_cast<int32_t>(pages_indptr[0] + pages);
    kv_indptr[1] = static_cast<int32_t>(kv_indptr[0] + length);
    qo_indptr[1] = static_cast<int32_t>(qo_indptr[0] + num_new(entry));
    ++pages_indptr, ++kv_indptr, ++qo_indptr;
    if (entry.wants_logits) *logits_index++ = *qo_indptr - 1;
  }
}

void fill_groups(int32_t* buffer, const Layout& layout, std::span<const BatchEntry> entries, int64_t block_size,
                 int64_t num_groups) {
  int32_t* slot = buffer + layout.group_slots.begin;
  int32_t* page = buffer + layout.group_pages.begin;
  for (int64_t group = 0; group < num_groups; ++group) {
    for (const BatchEntry& entry : entries) {
      const std::span<const int32_t> table = entry.group_blocks[static_cast<size_t>(group)];
      for (int64_t p = entry.num_cached; p < kv_len(entry); ++p) {
        *slot++ = static_cast<int32_t>(table[static_cast<size_t>(p / block_size)] * block_size + p % block_size);
      }
      // A freed page may have any valid index.
      page = std::ranges::transform(table.first(static_cast<size_t>(num_pages(entry, block_size))), page,
                                    [](int32_t block) { return std::max(block, 0); })
                 .out;
    }
  }
}

void fill_states(int32_t* buffer, const Layout& layout, std::span<const BatchEntry> entries) {
  int32_t* slot = buffer + layout.state_slots.begin;
  auto* has_initial_state = reinterpret_cast<uint8_t*>(buffer + layout.has_initial_state.begin);
  for (const BatchEntry& entry : entries) {
    *slot++ = entry.state_slot;
    *has_initial_state++ = entry.num_cached > 0 ? 1 : 0;
  }
}

at::Tensor view(const at::Tensor& buffer, const Section& section) {
  return buffer.narrow(0, section.begin, section.size);
}

}  // namespace

Batch build_batch(std::span<const BatchEntry> entries, int64_t block_size, at::Device device, bool has_states,
                  int64_t num_groups) {
  const Layout layout = make_layout(entries, block_size, has_states, num_groups);
  // A new buffer per step: the allocator reuses pinned memory only after its copies have completed.
  const at::Tensor host =
      at::empty({layout.size}, at::TensorOptions().dtype(at::kInt).pinned_memory(device.is_cuda()));
  fill(host.mutable_data_ptr<int32_t>(), layout, entries, block_size);
  fill_groups(host.mutable_data_ptr<int32_t>(), layout, entries, block_size, num_groups);
  if (has_states) fill_states(host.mutable_data_ptr<int32_t>(), layout, entries);
  const at::Tensor on_device = device.is_cpu() ? host : host.to(device, /*non_blocking=*/true);

  Batch batch;
  batch.tokens = view(on_device, layout.tokens);
  batch.positions = view(on_device, layout.positions);
  batch.logits_indices = view(on_device, layout.logits_indices);
  batch.metadata.slot_mapping(view(on_device, layout.slot_mapping))
      .paged_kv_indptr(view(on_device, layout.pages_indptr))
      .paged_kv_indices(view(on_device, layout.page_indices))
      .paged_kv_last_page_len(view(on_device, layout.last_page_lens))
      .kv_cu_seq_lens(view(on_device, layout.kv_indptr))
      .kv_seq_lens_host(view(host, layout.kv_indptr))
      .paged_kv_indptr_host(view(host, layout.pages_indptr))
      .paged_kv_last_page_len_host(view(host, layout.last_page_lens))
      .max_query_len(layout.max_query_len)
      .max_seq_len(layout.max_seq_len)
      .is_prefill(layout.is_prefill)
      .is_chunked_prefill(!layout.is_decode && !layout.is_prefill);
  if (!layout.is_decode) {
    batch.metadata.qo_indptr(view(on_device, layout.qo_indptr)).qo_indptr_host(view(host, layout.qo_indptr));
  }
  if (num_groups > 0) {
    batch.metadata.group_slot_mapping(view(on_device, layout.group_slots).view({num_groups, -1}))
        .group_paged_kv_indices(view(on_device, layout.group_pages).view({num_groups, -1}));
  }
  if (has_states) {
    const at::Tensor flags = view(on_device, layout.has_initial_state).view(at::kBool);
    batch.metadata.linear_state_indices(view(on_device, layout.state_slots))
        .has_initial_state(flags.narrow(0, 0, std::ssize(entries)));
  }
  return batch;
}

}  // namespace xllm_worker
