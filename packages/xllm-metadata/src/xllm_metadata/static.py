"""`StaticAttentionMetadata`: one step's metadata in buffers at fixed addresses, as a captured graph needs it.

How a fill works:

- A fill reads the step's fields once and looks up a `CopyPlan` by the step's shape: live and padded sizes, decode or
  not, fields present. The plan holds every target view. Making a view costs the host about a microsecond, so views are
  made once per shape.
- One batched copy (`torch._foreach_copy_`) writes all int32 device fields: live parts and padding. A launch costs the
  host microseconds of a decode step of about a millisecond. So padding has no launch of its own: constant padding is
  copied from constant tensors, and a short tail of repeated offsets element by element from the last live offset.
- The runner's token inputs join the same launch as `extra_copies`.
- A second call copies the host mirrors. `fill(host=False)` leaves them to `fill_host`, which a runner calls after it
  has enqueued the step: the copies then overlap with the device's work.

`buffers` allocates, `copy_plan` describes the copies, and this module does them. What pads a field is read from
`FIELDS`. A graph runner decides when to fill, and to which size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from .buffers import Buffers, is_variable_length
from .copy_plan import CopyBatch, CopyPair, CopyPlan, FieldView, make_copy_plan
from .fields import FIELDS
from .protocol import AttentionMetadata
from .schema import FieldType

_MAX_PLANS = 1024  # cached; beyond that the cache starts again


class StaticAttentionMetadata:
    """Static buffers for a step's metadata; satisfies `AttentionMetadata` after `fill`.

    A tensor attribute is the leading part of its buffer at the padded size of the last `fill`: equal sizes give equal
    addresses. `paged_kv_indices` and `group_paged_kv_indices` are whole buffers. Each row of a group's field is
    contiguous. A field that has no buffer, or that the last step lacks, is None.

    Args:
        max_num_tokens: largest T.
        max_num_seqs: largest B.
        max_num_pages: largest P, all sequences together.
        device: device of the device fields. Host fields are pinned when this is a CUDA device.
        optional: names of optional fields that get buffers. Fields sized by R cannot: no model needs them yet.
        max_pages_per_seq: largest W (`block_table`).
        num_group_tables: G, of `group_slot_mapping` and `group_paged_kv_indices`; every step has this number.

    Raises:
        ValueError: a size below 1, or an optional field that cannot have a buffer.
    """

    # The fields of the table, for editors and type checkers. A test compares them.
    slot_mapping: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    kv_cu_seq_lens: torch.Tensor
    qo_indptr: torch.Tensor | None
    kv_seq_lens_host: torch.Tensor
    paged_kv_indptr_host: torch.Tensor
    paged_kv_last_page_len_host: torch.Tensor
    qo_indptr_host: torch.Tensor | None
    max_query_len: int
    max_seq_len: int
    is_prefill: bool
    is_chunked_prefill: bool

    block_table: torch.Tensor | None
    kv_seq_lens: torch.Tensor | None
    q_seq_lens: torch.Tensor | None
    linear_state_indices: torch.Tensor | None
    linear_state_write_indices: torch.Tensor | None
    has_initial_state: torch.Tensor | None
    dp_token_counts: torch.Tensor | None
    dp_is_decode: torch.Tensor | None
    group_slot_mapping: torch.Tensor | None
    group_paged_kv_indices: torch.Tensor | None

    q_cu_seq_lens: torch.Tensor | None  # alias of qo_indptr

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_num_pages: int,
        device: torch.device | str,
        optional: Collection[str] = (),
        max_pages_per_seq: int = 1,
        num_group_tables: int = 1,
    ) -> None:
        capacity = {
            "T": max_num_tokens,
            "B": max_num_seqs,
            "P": max_num_pages,
            "W": max_pages_per_seq,
            "G": num_group_tables,
        }
        self.device = torch.device(device)
        self._buffers = Buffers.allocate(capacity, optional, self.device)
        self._num_fixed = sum(not is_variable_length(field) for field in self._buffers.fields)
        self._scalars = [field.name for field in FIELDS if not field.type.is_tensor]
        for field in FIELDS:
            if not field.type.is_tensor:
                setattr(self, field.name, False if field.type is FieldType.BOOL else 0)
            elif field.name not in self._buffers.by_name:
                setattr(self, field.name, None)
        # Each reads all its fields of a step in one call: a read of a C++ view is not free.
        self._read = attrgetter(*(field.name for field in self._buffers.fields))
        self._read_scalars = attrgetter(*self._scalars)
        self._plans: dict[tuple[object, ...], CopyPlan] = {}
        self._aliased: CopyPlan | None = None  # the plan whose aliased_views are this object's attributes
        self._pending_host: tuple[CopyPlan, tuple[Any, ...], bool] | None = None  # arguments of the next fill_host
        # Last target of each variable-length field, and its shape.
        self._variable_targets: dict[FieldView, tuple[torch.Size, torch.Tensor]] = {}

    def buffer(self, name: str) -> torch.Tensor:
        """The whole buffer of a tensor field. Raises `KeyError` for a field that has none."""
        return self._buffers.by_name[name]

    def fill(
        self,
        metadata: AttentionMetadata,
        *,
        num_tokens: int,
        num_seqs: int,
        extra_copies: Iterable[CopyPair] = (),
        host: bool = True,
    ) -> None:
        """Copies a step's metadata into the buffers and pads it to `num_tokens` tokens and `num_seqs` sequences.

        Enqueues copies on the current stream; never waits for the device.

        Args:
            metadata: the step's.
            num_tokens, num_seqs: T and B after padding.
            extra_copies: (target, source) pairs of int32 device tensors of equal shape, copied in the same launch.
            host: whether to fill the host fields now. If not, they have this step's sizes and an earlier step's values
                until `fill_host`.

        Raises:
            ValueError: the padded size is below the live size or above the capacity, or a field that must be present
                is None. Nothing has been changed then.
        """
        is_decode = not (metadata.is_prefill or metadata.is_chunked_prefill)
        sources = self._read(metadata)
        plan = self._plan(sources, is_decode, num_tokens, num_seqs)
        # All checks come before the first write.
        targets, copied = self._copies(plan.device, sources, is_decode)
        unbatched = None if plan.unbatched.is_empty else self._copies(plan.unbatched, sources, is_decode)
        if plan.host.variable_length:
            self._copies(plan.host, sources, is_decode)
        if plan is not self._aliased:  # setting the attributes costs the host as much as the copies
            self._aliased = plan
            self.__dict__.update(plan.aliased_views)
        for index, target, constant in plan.tail_fills:
            if sources[index].shape != target.shape:
                target.fill_(constant)
        for target, source in extra_copies:
            targets.append(target)
            copied.append(source)
        _copy(targets, copied, plan.device.repeat_last_rows)
        if unbatched is not None:
            for target, source in zip(*unbatched, strict=True):
                target.copy_(source, non_blocking=True)
        self.__dict__.update(zip(self._scalars, self._read_scalars(metadata), strict=True))
        self._pending_host = plan, sources, is_decode
        if host:
            self.fill_host()

    def fill_host(self) -> None:
        """Fills the host fields from the last `fill`'s step, if `fill` left them out; else does nothing."""
        pending, self._pending_host = self._pending_host, None
        if pending is not None:
            plan, sources, is_decode = pending
            _copy(*self._copies(plan.host, sources, is_decode), plan.host.repeat_last_rows)

    def _copies(
        self, batch: CopyBatch, sources: Sequence[Any], is_decode: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Targets and sources of a batch. Writes to no buffer, so that a refused step changes nothing."""
        targets = [*batch.targets]
        copied = [sources[index] for index in batch.fields]
        copied += batch.constants
        for index, view in batch.variable_length:
            targets.append(self._variable_target(view, sources[index], is_decode))
            copied.append(sources[index])
        for index, tail in batch.repeat_last:
            targets += tail
            copied += [sources[index][-1:]] * len(tail)
        return targets, copied

    def _variable_target(self, view: FieldView, source: torch.Tensor, is_decode: bool) -> torch.Tensor:
        """The part of the buffer that the source fills. Cached: the size stays the same for many steps."""
        size = source.shape
        known = self._variable_targets.get(view)
        if known is not None and known[0] == size:
            return known[1]
        view.check(source, is_decode)
        target = view.padded[tuple(slice(0, live) for live in size)]
        self._variable_targets[view] = size, target
        return target

    def _plan(self, sources: tuple[Any, ...], is_decode: bool, num_tokens: int, num_seqs: int) -> CopyPlan:
        """The plan for a step of this shape, from the cache or new.

        The key holds all that `make_copy_plan` checks except the sizes of variable-length fields, which
        `_variable_target` checks.
        """
        fixed, variable_length = sources[: self._num_fixed], sources[self._num_fixed :]
        shapes = [None if source is None else source.shape for source in fixed]
        key = (num_tokens, num_seqs, is_decode, *shapes, *[source is None for source in variable_length])
        plan = self._plans.get(key)
        if plan is None:
            plan = make_copy_plan(self._buffers, sources, is_decode=is_decode, num_tokens=num_tokens, num_seqs=num_seqs)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
                self._variable_targets.clear()
            self._plans[key] = plan
        return plan


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], after: Iterable[CopyPair]) -> None:
    """Copies all pairs in one call, and then those of `after`, whose sources are among the targets."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for target, source in after:
        target.copy_(source, non_blocking=True)
