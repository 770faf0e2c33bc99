"""Writes a step's keys and values into the paged cache. Owns which row goes to which slot, planned once per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...fp8_cache import FP8, quantize


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendPlan:
    """Where each row of a step is written. T tokens.

    A row whose slot is below 0 is redirected: it repeats the first live row, value and slot, so that every write to
    one slot carries the same bytes and no row has to be dropped, which would need its count on the host. Without any
    live row all rows rewrite slot 0 with what it holds.
    """

    rows: torch.Tensor  # [T] int64, row of k and v to take
    pages: torch.Tensor  # [T] int64, page to write
    offsets: torch.Tensor  # [T] int64, slot in that page
    any_live: torch.Tensor  # [] bool

    @classmethod
    def allocate(cls, num_tokens: int, device: torch.device) -> AppendPlan:
        """Buffers for `num_tokens` rows, to be filled in place."""
        rows, pages, offsets = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)
        return cls(rows=rows, pages=pages, offsets=offsets, any_live=torch.zeros((), dtype=torch.bool, device=device))

    def refill(self, other: AppendPlan) -> AppendPlan:
        """Copies `other` into the leading rows of this plan's buffers, and returns those as a plan."""
        num_tokens = other.rows.shape[0]
        view = AppendPlan(
            rows=self.rows[:num_tokens],
            pages=self.pages[:num_tokens],
            offsets=self.offsets[:num_tokens],
            any_live=self.any_live,
        )
        view.rows.copy_(other.rows)
        view.pages.copy_(other.pages)
        view.offsets.copy_(other.offsets)
        view.any_live.copy_(other.any_live)
        return view


def plan_append(slot_mapping: torch.Tensor, page_size: int) -> AppendPlan:
    """Turns slots [T] int32 into an `AppendPlan`, on the device and without waiting for it."""
    slots = slot_mapping.to(torch.int64)
    num_tokens = slots.shape[0]
    if num_tokens == 0:
        return AppendPlan.allocate(0, slots.device)
    live = slots >= 0
    rows = torch.where(live, torch.arange(num_tokens, device=slots.device), live.to(torch.int8).argmax())
    targets = slots.index_select(0, rows).clamp_min(0)
    return AppendPlan(
        rows=rows,
        pages=targets.div(page_size, rounding_mode="floor"),
        offsets=targets.remainder(page_size),
        any_live=live.any(),
    )


def append(plan: AppendPlan, values: torch.Tensor, cache: torch.Tensor, scale: float = 1.0) -> None:
    """Writes `values` [>= T, K, D] into `cache` [num_pages, page_size, K, D] in place; its strides are honoured.

    scale: of an fp8 cache.
    """
    if cache.dtype is FP8:  # as bytes: PyTorch has few ops for fp8
        values, cache = quantize(values, scale).view(torch.uint8), cache.view(torch.uint8)
    chosen = torch.where(plan.any_live, values.index_select(0, plan.rows), cache[0, 0])
    cache.index_put_((plan.pages, plan.offsets), chosen)
