"""Collectives through memory that the ranks' devices read of each other: one-shot, two-shot, else the group's own.

Owns the shared memory and the choice among the calls, all capturable: one-shot sums, with norms behind them too, are
`kernels.shared_sums`'s, gathers `kernels.shared_gather`'s, two-shot sums an op of torch's symmetric memory. No NVLink
multicast: nothing here uses it, so it is not even set up. Whether a group can have this is agreed by the host before it
is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import distributed

from .transports import ALIGNMENT, SYMMETRIC_DTYPES, GroupTransport, TransportRule, Way


def lacking() -> tuple[str, ...]:
    """What `SymmetricTransport` needs and this installation has not; empty when all is there."""
    needed = {
        "triton": find_spec("triton") is not None,
        "torch.ops.symm_mem.two_shot_all_reduce_out": hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"),
    }
    return tuple(name for name, present in needed.items() if not present)


class SymmetricTransport:
    """See `Transport`. Made by all ranks of the group at once.

    Takes some 70 MB of its device for two ranks, 16 MB more for each further one. Calls follow each other on one
    stream, in the same order on all ranks. Graphs that captured them must be gone before this is.

    Raises:
        ValueError: a rule whose one-shot payloads are larger than the kernels take.
        RuntimeError: the ranks' devices cannot read each other's memory.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, rule: TransportRule) -> None:
        from torch.distributed import _symmetric_memory

        from ..kernels import channels, shared_gather, shared_sums

        for name, value, limit in (
            ("one_shot_max_bytes", rule.one_shot_max_bytes, channels.SUM_MAX_BYTES),
            ("gather_max_bytes", rule.gather_max_bytes, channels.GATHER_MAX_BYTES),
        ):
            if value > limit:
                raise ValueError(f"{name} is {value}; at most {limit} are served")
        # Setting multicast up costs time and can fail where peer access works.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._rule = rule
        self._name: str = group.group_name
        channels_at = -(-rule.two_shot_max_bytes // 128) * 128
        memory = _symmetric_memory.empty(
            channels_at + channels.shared_bytes(group.size()), dtype=torch.uint8, device=device
        )
        memory[:channels_at].zero_()
        channels.prepare(memory[channels_at:], group.size())
        torch.accelerator.synchronize(device)  # before any rank may write to another's memory
        shared = _symmetric_memory.rendezvous(memory, group)
        self._memory = {dtype: memory[:channels_at].view(dtype) for dtype in SYMMETRIC_DTYPES}
        self._channels = channels.Channels(
            rank=group.rank(),
            addresses=torch.tensor([address + channels_at for address in shared.buffer_ptrs], device=device),
            counts=channels.new_counts(device),
        )
        self._sums, self._gathers = shared_sums, shared_gather
        self._group = GroupTransport(group)
        self._ways: Mapping[Way, tuple[str, Callable[[torch.Tensor], object]]] = {
            Way.ONE_SHOT: (Way.ONE_SHOT.value, self._at_once),
            Way.TWO_SHOT: (Way.TWO_SHOT.value, self._in_two_steps),
            Way.GROUP: (self._group.name, self._group.all_reduce_),
        }

    def all_reduce_(self, x: torch.Tensor) -> str:
        """See `Transport.all_reduce_`."""
        name, call = self._ways[self._reduce_way(x)]
        call(x)
        return name

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, dim: int) -> str:
        """See `Transport.all_gather_into`."""
        size = x.element_size()
        num_bytes = x.numel() * size
        row_bytes = num_bytes // max(x.shape[0], 1) if dim == 1 else num_bytes
        if self._rule.gather_way(num_bytes, row_bytes, int(x.storage_offset()) * size) is Way.GROUP:
            return self._group.all_gather_into(out, x, dim)
        self._gathers.all_gather_into(out, x, dim, self._channels)
        return Way.ONE_SHOT.value

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
        prefetch: torch.Tensor | None = None,
    ) -> tuple[str, torch.Tensor, torch.Tensor] | None:
        """See `Transport.all_reduce_add_rms_norm`: sums that are one-shot, of [T, N] with rows of 16 bytes."""
        if self._reduce_way(x) is not Way.ONE_SHOT or x.ndim != 2 or x.shape[1] * x.element_size() % ALIGNMENT:
            return None
        done = self._sums.all_reduce_add_rms_norm(
            x, residual.contiguous(), weight, eps, unit_offset, prefetch, self._channels
        )
        return None if done is None else (Way.ONE_SHOT.value, *done)

    def _reduce_way(self, x: torch.Tensor) -> Way:
        size = x.element_size()
        return self._rule.reduce_way(x.numel() * size, x.dtype, int(x.storage_offset()) * size)

    def _at_once(self, x: torch.Tensor) -> None:
        self._sums.all_reduce_(x, self._channels)

    def _in_two_steps(self, x: torch.Tensor) -> None:
        shared = self._memory[x.dtype][: x.numel()].view(x.shape)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)
