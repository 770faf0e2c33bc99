"""All-reduce through memory that the ranks' devices read of each other: one-shot, two-shot, else the group's own.

Owns the shared buffer and the calls of torch's symmetric-memory ops, all capturable. No NVLink multicast: nothing here
uses it, so it is not even set up. Whether a group can have this is agreed by the host before it is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import distributed

from .transports import AllReduceRule, GroupTransport, Way

# Of torch.ops.symm_mem: what is called here.
NEEDED_OPS = ("one_shot_all_reduce_copy_out", "two_shot_all_reduce_out")


def lacking_ops() -> tuple[str, ...]:
    """The ops of this torch that are missing for `SymmetricTransport`; empty when all are there."""
    return tuple(name for name in NEEDED_OPS if not hasattr(torch.ops.symm_mem, name))


class SymmetricTransport:
    """See `Transport`. Made by all ranks of the group at once; takes `rule.two_shot_max_bytes` of device memory.

    One buffer serves every call: each kernel ends when all ranks have read it, and calls follow each other on one
    stream, in the same order on all ranks. Graphs that captured it must be gone before it is.

    Raises:
        RuntimeError: the ranks' devices cannot read each other's memory.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, rule: AllReduceRule) -> None:
        from torch.distributed import _symmetric_memory

        # Setting multicast up costs time and can fail where peer access works.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._rule = rule
        self._name: str = group.group_name
        buffer = _symmetric_memory.empty(rule.two_shot_max_bytes, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(buffer, group)
        self._buffers = {dtype: buffer.view(dtype) for dtype in (torch.bfloat16, torch.float32)}
        ways: Mapping[Way, Callable[[torch.Tensor], object]] = {
            Way.ONE_SHOT: self._one_shot,
            Way.TWO_SHOT: self._two_shot,
            Way.GROUP: (by_group := GroupTransport(group)).all_reduce_,
        }
        names = {Way.ONE_SHOT: Way.ONE_SHOT.value, Way.TWO_SHOT: Way.TWO_SHOT.value, Way.GROUP: by_group.name}
        self._ways = {way: (names[way], call) for way, call in ways.items()}

    def all_reduce_(self, x: torch.Tensor) -> str:
        """See `Transport.all_reduce_`."""
        size = x.element_size()
        name, call = self._ways[self._rule.way(x.numel() * size, x.dtype, int(x.storage_offset()) * size)]
        call(x)
        return name

    def _one_shot(self, x: torch.Tensor) -> None:
        # The kernel copies x into the buffer itself, each block its own part, before it meets the other ranks.
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(self._shared(x), x, "sum", self._name, x)

    def _two_shot(self, x: torch.Tensor) -> None:
        shared = self._shared(x)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        return self._buffers[x.dtype][: x.numel()].view(x.shape)
