#include "native/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <map>

namespace xllm_worker::native {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kQueryBlock = 256;  // query rows per masked block

struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  at::Tensor of(const at::Tensor& tensor) const { return tensor.narrow(0, begin, size()); }
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t first_visible(int64_t position, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

at::Tensor attend(const at::Tensor& q,
                  const at::Tensor& k,
                  const at::Tensor& v,
                  const AttentionLayer& layer,
                  const std::optional<at::Tensor>& mask,
                  bool causal) {
  const auto batched = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  if (q.size(0) == 1) {
    // The query heads of a kv head see the same keys, so they become query rows.
    const at::Tensor grouped =
        q.reshape({1, layer.num_kv_heads, layer.num_heads / layer.num_kv_heads, layer.head_dim});
    const at::Tensor out = at::scaled_dot_product_attention(
        grouped, batched(k), batched(v), std::nullopt, 0.0, /*is_causal=*/false, layer.scale);
    return out.reshape({1, layer.num_heads, layer.head_dim});
  }
  const at::Tensor out = at::scaled_dot_product_attention(batched(q),
                                                          batched(k),
                                                          batched(v),
                                                          mask,
                                                          0.0,
                                                          causal,
                                                          layer.scale,
                                                          /*enable_gqa=*/layer.num_heads > layer.num_kv_heads);
  return out[0].transpose(0, 1);
}

struct Block {
  Range rows;  // of the step's tokens
  Range keys;  // of the sequence's gathered keys
  std::optional<at::Tensor> mask;
  bool causal = false;

  bool hides_keys() const { return causal || mask; }

  // Which rows see a marked key: marked [keys] -> [rows], both bool.
  at::Tensor sees(const at::Tensor& marked) const {
    if (causal) return marked.cumsum(0).gt(0);
    return (mask ? mask->eq(0).logical_and(marked) : marked.unsqueeze(0)).any(1);
  }
};

struct PlannedSequence {
  at::Tensor pages;  // int64
  Range tokens;      // of the gathered ones
  std::vector<Block> blocks;
};

// The masks of one plan. Blocks of the same shape share a mask.
class Masks {
 public:
  Masks(int64_t window, at::ScalarType dtype, at::Device device) : window_(window), like_(dtype), device_(device) {}

  at::Tensor get(int64_t num_rows, int64_t num_before) {
    at::Tensor& mask = made_[{num_rows, num_before}];
    if (!mask.defined()) {
      const auto longs = at::TensorOptions().dtype(at::kLong).device(device_);
      const at::Tensor own = at::arange(num_before, num_before + num_rows, longs).unsqueeze(1);
      const at::Tensor key = at::arange(num_before + num_rows, longs).unsqueeze(0);
      at::Tensor hidden = key > own;
      if (window_ > 0) hidden = hidden.logical_or(key <= own - window_);
      mask = at::zeros(hidden.sizes(), at::TensorOptions().dtype(like_).device(device_));
      mask.masked_fill_(hidden, kMinusInfinity);
    }
    return mask;
  }

 private:
  int64_t window_;
  at::ScalarType like_;
  at::Device device_;
  std::map<std::pair<int64_t, int64_t>, at::Tensor> made_;
};

std::vector<Block> plan_blocks(Range rows, int64_t kv_len, int64_t first_key, int64_t window, Masks& masks) {
  const int64_t q_len = rows.size();
  const int64_t prefix_len = kv_len - q_len;
  const bool is_plain = prefix_len == 0 && !(0 < window && window < kv_len);
  if (is_plain && q_len > 1) return {{rows, {0, kv_len}, std::nullopt, /*causal=*/true}};
  std::vector<Block> blocks;
  for (int64_t start = 0; start < q_len; start += kQueryBlock) {
    const int64_t stop = std::min(start + kQueryBlock, q_len);
    const int64_t lowest = first_visible(prefix_len + start, window);
    Block block;
    block.rows = {rows.begin + start, rows.begin + stop};
    block.keys = {lowest - first_key, prefix_len + stop - first_key};
    if (stop - start > 1) block.mask = masks.get(stop - start, prefix_len + start - lowest);
    blocks.push_back(std::move(block));
  }
  return blocks;
}

class RaggedPlan : public AttentionPlan {
 public:
  RaggedPlan(const AttentionMetadata& metadata, const AttentionLayer& layer, int64_t page_size, at::ScalarType dtype)
      : layer_(layer) {
    const at::Tensor& kv_indptr = metadata.kv_seq_lens_host();
    const int64_t num_seqs = kv_indptr.numel() - 1;
    const int32_t* kv = kv_indptr.const_data_ptr<int32_t>();
    const int32_t* pages = metadata.paged_kv_indptr_host().const_data_ptr<int32_t>();
    const int32_t* qo = metadata.qo_indptr_host() ? metadata.qo_indptr_host()->const_data_ptr<int32_t>() : nullptr;
    const at::Tensor indices = metadata.paged_kv_indices().narrow(0, 0, pages[num_seqs]).to(at::kLong);
    Masks masks(layer.sliding_window, dtype, indices.device());
    for (int64_t i = 0; i < num_seqs; ++i) {
      const int64_t kv_len = kv[i + 1] - kv[i];
      const Range rows = qo == nullptr ? Range{i, i + (kv_len > 0)} : Range{qo[i], qo[i + 1]};
      num_rows_ += rows.size();
      if (rows.size() == 0) continue;
      const int64_t first_key = first_visible(kv_len - rows.size(), layer.sliding_window);
      const int64_t first_page = first_key / page_size;
      const int64_t base = first_page * page_size;
      const Range table{pages[i] + first_page, pages[i] + ceil_div(kv_len, page_size)};
      sequences_.push_back({table.of(indices),
                            {first_key - base, kv_len - base},
                            plan_blocks(rows, kv_len, first_key, layer.sliding_window, masks)});
    }
  }

  void run(const at::Tensor& q, const KvCache& cache, at::Tensor& out) const override {
    if (num_rows_ < out.size(0)) out.zero_();
    for (const PlannedSequence& sequence : sequences_) {
      at::Tensor k = sequence.tokens.of(cache.k.index_select(0, sequence.pages).flatten(0, 1));
      at::Tensor v = sequence.tokens.of(cache.v.index_select(0, sequence.pages).flatten(0, 1));
      // A mask does not remove a NaN: 0 * NaN is NaN. So bad keys become 0, and rows that see one become NaN.
      at::Tensor bad;
      if (std::ranges::any_of(sequence.blocks, &Block::hides_keys)) {
        bad = at::isfinite(k).logical_and(at::isfinite(v)).flatten(1).all(1).logical_not();
        const at::Tensor of_elements = bad.unsqueeze(1).unsqueeze(1);
        k = k.masked_fill(of_elements, 0);
        v = v.masked_fill(of_elements, 0);
      }
      for (const Block& block : sequence.blocks) {
        at::Tensor result =
            attend(block.rows.of(q), block.keys.of(k), block.keys.of(v), layer_, block.mask, block.causal);
        if (bad.defined()) {
          result = result.masked_fill(block.sees(block.keys.of(bad)).unsqueeze(1).unsqueeze(1), kNaN);
        }
        block.rows.of(out).copy_(result);
      }
    }
  }

 private:
  AttentionLayer layer_;
  std::vector<PlannedSequence> sequences_;
  int64_t num_rows_ = 0;
};

class DenseDecodePlan : public AttentionPlan {
 public:
  DenseDecodePlan(const AttentionMetadata& metadata,
                  const AttentionLayer& layer,
                  int64_t page_size,
                  int64_t num_rows,
                  int64_t max_model_len)
      : layer_(layer), num_rows_(num_rows) {
    const int64_t window = layer.sliding_window;
    int64_t num_pages = ceil_div(max_model_len, page_size);
    if (window > 0) num_pages = std::min(num_pages, (window + 2 * page_size - 2) / page_size);
    const auto longs = at::TensorOptions().dtype(at::kLong).device(metadata.slot_mapping().device());

    // Padding rows have length 0.
    const int64_t num_live = metadata.kv_cu_seq_lens().numel() - 1;
    at::Tensor kv_lens = at::zeros({num_rows, 1}, longs);
    kv_lens.narrow(0, 0, num_live).copy_(metadata.kv_cu_seq_lens().to(at::kLong).diff().unsqueeze(1));
    at::Tensor table_begins = at::zeros({num_rows, 1}, longs);
    table_begins.narrow(0, 0, num_live).copy_(metadata.paged_kv_indptr().narrow(0, 0, num_live).unsqueeze(1));

    const at::Tensor first_keys = window > 0 ? (kv_lens - window).clamp_min(0) : at::zeros_like(kv_lens);
    const at::Tensor first_pages = first_keys.div(page_size, "floor");
    const at::Tensor wanted = first_pages + at::arange(num_pages, longs);
    pages_ = at::zeros_like(wanted);
    if (metadata.paged_kv_indices().numel() > 0) {
      // masked_fill, not where: where copies a scalar operand to the device, which synchronizes.
      const at::Tensor missing = wanted * page_size >= kv_lens;
      const at::Tensor table_indices = (table_begins + wanted).masked_fill(missing, 0);
      const at::Tensor pages = metadata.paged_kv_indices().index_select(0, table_indices.flatten());
      pages_ = pages.view_as(table_indices).to(at::kLong).masked_fill(missing, 0);
    }
    const at::Tensor positions = first_pages * page_size + at::arange(num_pages * page_size, longs);
    hidden_ = (positions < first_keys).logical_or(positions >= kv_lens);
    empty_ = kv_lens.squeeze(1) == 0;
  }

  void run(const at::Tensor& q, const KvCache& cache, at::Tensor& out) const override {
    const int64_t group_size = layer_.num_heads / layer_.num_kv_heads;
    const at::ScalarType high = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor k = gather(cache.k).to(high);
    const at::Tensor v = gather(cache.v).masked_fill(hidden_.unsqueeze(-1).unsqueeze(-1), 0).to(high);
    const at::Tensor grouped =
        q.narrow(0, 0, num_rows_).reshape({num_rows_, layer_.num_kv_heads, group_size, layer_.head_dim}).to(high);
    at::Tensor scores = at::einsum("bkgd,blkd->bkgl", {grouped, k}) * layer_.scale;
    scores = scores.masked_fill(hidden_.unsqueeze(1).unsqueeze(1), kMinusInfinity);
    at::Tensor result = at::einsum("bkgl,blkd->bkgd", {scores.softmax(-1), v});
    result = result.reshape({num_rows_, layer_.num_heads, layer_.head_dim});
    out.narrow(0, 0, num_rows_)
        .copy_(result.masked_fill(empty_.unsqueeze(-1).unsqueeze(-1), 0).to(out.scalar_type()));
    out.narrow(0, num_rows_, out.size(0) - num_rows_).zero_();
  }

 private:
  at::Tensor gather(const at::Tensor& cache) const {
    return cache.index_select(0, pages_.flatten()).view({num_rows_, -1, cache.size(2), cache.size(3)});
  }

  AttentionLayer layer_;
  int64_t num_rows_;
  at::Tensor pages_;   // [B, pages a row] int64
  at::Tensor hidden_;  // [B, keys a row] bool
  at::Tensor empty_;   // [B] bool
};

}  // namespace

std::unique_ptr<AttentionPlan> plan_ragged(const AttentionMetadata& metadata,
                                           const AttentionLayer& layer,
                                           int64_t page_size,
                                           at::ScalarType dtype) {
  return std::make_unique<RaggedPlan>(metadata, layer, page_size, dtype);
}

std::unique_ptr<AttentionPlan> plan_dense_decode(const AttentionMetadata& metadata,
                                                 const AttentionLayer& layer,
                                                 int64_t page_size,
                                                 int64_t num_rows,
                                                 int64_t max_model_len) {
  return std::make_unique<DenseDecodePlan>(metadata, layer, page_size, num_rows, max_model_len);
}

void append(const at::Tensor& slots, const at::Tensor& k, const at::Tensor& v, const KvCache& cache) {
  const int64_t num_tokens = slots.numel();
  cache.k.flatten(0, 1).index_copy_(0, slots, k.narrow(0, 0, num_tokens));
  cache.v.flatten(0, 1).index_copy_(0, slots, v.narrow(0, 0, num_tokens));
}

}  // namespace xllm_worker::native
