# mypy: disallow-untyped-decorators=False
"""Top-k routing by softmax, and the alignment of (token, expert) pairs to tiles of one expert each.

Each of the two is one kernel in decode, where pairs are few. T tokens, k experts per token, P = T * k pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from .block_sizes import power_of_two

MAX_PAIRS_ONE_PROGRAM = 1024  # sorted by one program; torch sorts more. No measurement is recorded.


@triton.jit
def _topk_softmax_kernel(
    logits: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    stride: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One token: the softmax in fp32, then k times the largest probability that is left."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_E)
    present = index < num_experts
    value = tl.load(logits + token * stride + index, mask=present, other=float("-inf")).to(tl.float32)
    exponential = tl.exp(value - tl.max(value, axis=0))
    left = tl.where(present, exponential / tl.sum(exponential, axis=0), -1.0)
    choices = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), dtype=tl.int32)
    weight = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for choice in tl.static_range(0, top_k):
        # A padding row may hold NaN. Its choice must still be a valid expert.
        best = tl.minimum(tl.argmax(left, axis=0), num_experts - 1)
        weight = tl.where(choices == choice, tl.sum(tl.where(index == best, left, 0.0), axis=0), weight)
        chosen = tl.where(choices == choice, best, chosen)
        left = tl.where(index == best, -1.0, left)
    if NORMALIZE:
        weight = weight / tl.sum(weight, axis=0)
    target = token * top_k + choices
    tl.store(weights + target, weight.to(weights.dtype.element_ty), mask=choices < top_k)
    tl.store(experts + target, chosen, mask=choices < top_k)


@triton.jit
def _align_kernel(
    experts: tl.tensor,
    sorted_pairs: tl.tensor,
    pair_ends: tl.tensor,
    tile_ends: tl.tensor,
    tile_experts: tl.tensor,
    num_pairs: tl.constexpr,
    num_experts: tl.constexpr,
    num_tiles: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """The whole alignment in one program; see `Tiles`."""
    pairs = tl.arange(0, BLOCK_P)
    # Lanes without a pair sort after all experts.
    expert = tl.load(experts + pairs, mask=pairs < num_pairs, other=num_experts)
    ordered = tl.sort(expert * BLOCK_P + pairs)
    tl.store(sorted_pairs + pairs, ordered % BLOCK_P, mask=pairs < num_pairs)
    index = tl.arange(0, BLOCK_E)
    counts = tl.histogram(expert, BLOCK_E)
    counts = tl.where(index < num_experts, counts, 0)
    tile_end = tl.cumsum((counts + ROWS - 1) // ROWS, axis=0)
    tl.store(pair_ends + index, tl.cumsum(counts, axis=0), mask=index < num_experts)
    tl.store(tile_ends + index, tile_end, mask=index < num_experts)
    tiles = tl.arange(0, BLOCK_T)
    before = (tile_end[None, :] <= tiles[:, None]) & (index < num_experts)[None, :]
    tl.store(tile_experts + tiles, tl.sum(before.to(tl.int32), axis=1), mask=tiles < num_tiles)


_launch_topk_softmax = Launcher(_topk_softmax_kernel, num_warps=1)
_launch_align = Launcher(_align_kernel, num_warps=8)


def topk_softmax(router_logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """router_logits [T, E] -> weights [T, k] in their dtype, and experts [T, k] int32; see `ops.moe.topk_softmax`."""
    num_tokens, num_experts = router_logits.shape
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    weights = logits.new_empty((num_tokens, top_k))
    experts = logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    blocks = power_of_two(num_experts), power_of_two(top_k)
    constants = (logits.stride(0), num_experts, top_k, normalize, *blocks)
    if num_tokens:
        _launch_topk_softmax((num_tokens, 1, 1), (logits, weights, experts), (), constants)
    return weights, experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The pairs, sorted by expert and cut into tiles of at most `rows` pairs of one expert. The tensors are int32."""

    rows: int
    count: int  # tiles launched: the most that these shapes can need
    sorted_pairs: torch.Tensor  # [P] indices of the pairs, sorted by expert
    pair_ends: torch.Tensor  # [E] index after each expert's last pair in the sorted order
    tile_ends: torch.Tensor  # [E] index after each expert's last tile
    experts: torch.Tensor  # [count] each tile's expert; E for an unused tile

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.sorted_pairs, self.pair_ends, self.tile_ends, self.experts


def align_pairs(experts: torch.Tensor, num_experts: int) -> Tiles:
    """Aligns pairs to tiles: experts [P] int32, the expert of each pair."""
    num_pairs = experts.shape[0]
    # 16 rows is the least that tl.dot takes. No measurement is recorded for the limit of 32 pairs per expert.
    rows = 16 if num_pairs < 32 * num_experts else 64
    count = num_pairs // rows + min(num_pairs, num_experts)
    if num_pairs > MAX_PAIRS_ONE_PROGRAM:
        return _align_many_pairs(experts, num_experts, rows, count)
    sizes = (num_pairs, num_experts, num_experts, count)
    sorted_pairs, pair_ends, tile_ends, tile_experts = (experts.new_empty(size) for size in sizes)
    blocks = power_of_two(num_pairs), power_of_two(num_experts + 1), power_of_two(count)
    constants = (num_pairs, num_experts, count, rows, *blocks)
    _launch_align((1, 1, 1), (experts, sorted_pairs, pair_ends, tile_ends, tile_experts), (), constants)
    return Tiles(
        rows=rows,
        count=count,
        sorted_pairs=sorted_pairs,
        pair_ends=pair_ends,
        tile_ends=tile_ends,
        experts=tile_experts,
    )


def _align_many_pairs(experts: torch.Tensor, num_experts: int, rows: int, count: int) -> Tiles:
    ordered, order = experts.sort(stable=True)
    indices = torch.arange(num_experts, device=experts.device, dtype=torch.int32)
    pair_ends = torch.searchsorted(ordered, indices, right=True, out_int32=True)
    counts = torch.diff(pair_ends, prepend=pair_ends.new_zeros(1))
    tile_ends = ((counts + (rows - 1)) // rows).cumsum(0, dtype=torch.int32)
    tiles = torch.arange(count, device=experts.device, dtype=torch.int32)
    return Tiles(
        rows=rows,
        count=count,
        sorted_pairs=order.int(),
        pair_ends=pair_ends,
        tile_ends=tile_ends,
        experts=torch.searchsorted(tile_ends, tiles, right=True, out_int32=True),
    )
