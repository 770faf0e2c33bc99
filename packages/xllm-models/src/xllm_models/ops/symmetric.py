"""All-reduce through memory that the ranks' devices read of each other: one-shot, two-shot, else the group's own.

Owns the shared memory and the choice among the calls, all capturable: one-shot is a kernel of `kernels.all_reduce`,
two-shot an op of torch's symmetric memory. No NVLink multicast: nothing here uses it, so it is not even set up. Whether
a group can have this is agreed by the host before it is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import distributed

from .transports import SYMMETRIC_DTYPES, AllReduceRule, GroupTransport, Way


def lacking() -> tuple[str, ...]:
    """What `SymmetricTransport` needs and this installation has not; empty when all is there."""
    needed = {
        "triton": find_spec("triton") is not None,
        "torch.ops.symm_mem.two_shot_all_reduce_out": hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"),
    }
    return tuple(name for name, present in needed.items() if not present)


class SymmetricTransport:
    """See `Transport`. Made by all ranks of the group at once; takes a little more memory than `two_shot_max_bytes`.

    Calls follow each other on one stream, in the same order on all ranks. Graphs that captured them must be gone before
    this is.

    Raises:
        ValueError: a rule whose one-shot payloads are larger than the kernel takes.
        RuntimeError: the ranks' devices cannot read each other's memory.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, rule: AllReduceRule) -> None:
        from torch.distributed import _symmetric_memory

        from ..kernels import all_reduce

        if rule.one_shot_max_bytes > all_reduce.MAX_BYTES:
            raise ValueError(
                f"one_shot_max_bytes is {rule.one_shot_max_bytes}; at most {all_reduce.MAX_BYTES} are served"
            )
        # Setting multicast up costs time and can fail where peer access works.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._rule = rule
        self._name: str = group.group_name
        channels_at = -(-rule.two_shot_max_bytes // 128) * 128
        memory = _symmetric_memory.empty(
            channels_at + all_reduce.shared_bytes(group.size()), dtype=torch.uint8, device=device
        )
        memory.zero_()
        torch.accelerator.synchronize(device)  # before any rank may write to another's memory
        shared = _symmetric_memory.rendezvous(memory, group)
        self._memory = {dtype: memory[:channels_at].view(dtype) for dtype in SYMMETRIC_DTYPES}
        self._channels = all_reduce.Channels(
            rank=group.rank(),
            addresses=torch.tensor([address + channels_at for address in shared.buffer_ptrs], device=device),
            counts=torch.zeros(
                (len(all_reduce.BLOCK_BYTES), all_reduce.NUM_PROGRAMS), dtype=torch.int32, device=device
            ),
        )
        self._one_shot = all_reduce.one_shot
        by_group = GroupTransport(group)
        self._ways: Mapping[Way, tuple[str, Callable[[torch.Tensor], object]]] = {
            Way.ONE_SHOT: (Way.ONE_SHOT.value, self._all_at_once),
            Way.TWO_SHOT: (Way.TWO_SHOT.value, self._in_two_steps),
            Way.GROUP: (by_group.name, by_group.all_reduce_),
        }

    def all_reduce_(self, x: torch.Tensor) -> str:
        """See `Transport.all_reduce_`."""
        size = x.element_size()
        name, call = self._ways[self._rule.way(x.numel() * size, x.dtype, int(x.storage_offset()) * size)]
        call(x)
        return name

    def _all_at_once(self, x: torch.Tensor) -> None:
        self._one_shot(x, self._channels)

    def _in_two_steps(self, x: torch.Tensor) -> None:
        shared = self._memory[x.dtype][: x.numel()].view(x.shape)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)
