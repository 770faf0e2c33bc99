"""`SymmetricTransport`: one-shot and two-shot collectives through symmetric memory, else the group's own backend.

Owns the symmetric memory and calls the algorithm that the rule chooses. All calls can be captured in a device graph.
The one-shot kernels are those of `kernels.lamport_all_reduce` and `kernels.symmetric_all_gather`; the two-shot
all-reduce is an op of torch's symmetric memory. Nothing here uses NVLink multicast, so it is not set up. The host makes
the ranks agree on this transport before any of them creates it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import distributed

from .transports import ALIGNMENT, SYMMETRIC_DTYPES, Algorithm, GroupTransport, TransportRule


def missing_requirements() -> tuple[str, ...]:
    """Names of the requirements of `SymmetricTransport` that this installation lacks."""
    needed = {
        "triton": find_spec("triton") is not None,
        "torch.ops.symm_mem.two_shot_all_reduce_out": hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"),
    }
    return tuple(name for name, present in needed.items() if not present)


class SymmetricTransport:
    """See `Transport`. The constructor is a collective: all ranks of the group call it at the same time.

    Takes some 70 MB of device memory for two ranks, 16 MB more for each further rank. All calls run on one stream, in
    the same order on all ranks. Graphs that captured calls must be destroyed before the transport.

    Raises:
        ValueError: a limit of the rule exceeds that of the kernels.
        RuntimeError: the ranks' devices cannot read each other's memory.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, rule: TransportRule) -> None:
        from torch.distributed import _symmetric_memory

        from ..kernels import lamport_all_reduce, symmetric_all_gather, symmetric_buffers

        for name, value, limit in (
            ("one_shot_max_bytes", rule.one_shot_max_bytes, symmetric_buffers.SUM_MAX_BYTES),
            ("gather_max_bytes", rule.gather_max_bytes, symmetric_buffers.GATHER_MAX_BYTES),
        ):
            if value > limit:
                raise ValueError(f"{name} is {value}; at most {limit} are served")
        # Multicast set-up takes time, and can fail where peer access works.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._rule = rule
        self._name: str = group.group_name
        offset = -(-rule.two_shot_max_bytes // 128) * 128
        memory = _symmetric_memory.empty(
            offset + symmetric_buffers.buffer_bytes(group.size()), dtype=torch.uint8, device=device
        )
        memory[:offset].zero_()
        symmetric_buffers.initialize(memory[offset:], group.size())
        torch.accelerator.synchronize(device)  # a peer may write to this memory after the rendezvous
        shared = _symmetric_memory.rendezvous(memory, group)
        self._memory = {dtype: memory[:offset].view(dtype) for dtype in SYMMETRIC_DTYPES}
        self._buffers = symmetric_buffers.SymmetricBuffers(
            rank=group.rank(),
            addresses=torch.tensor([address + offset for address in shared.buffer_ptrs], device=device),
            counts=symmetric_buffers.new_counts(device),
        )
        self._all_reduce, self._all_gather = lamport_all_reduce, symmetric_all_gather
        self._group = GroupTransport(group)
        self._algorithms: Mapping[Algorithm, tuple[str, Callable[[torch.Tensor], object]]] = {
            Algorithm.ONE_SHOT: (Algorithm.ONE_SHOT.value, self._one_shot),
            Algorithm.TWO_SHOT: (Algorithm.TWO_SHOT.value, self._two_shot),
            Algorithm.GROUP: (self._group.name, self._group.all_reduce_),
        }

    def all_reduce_(self, x: torch.Tensor) -> str:
        """See `Transport.all_reduce_`."""
        name, call = self._algorithms[self._algorithm(x)]
        call(x)
        return name

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, dim: int) -> str:
        """See `Transport.all_gather_into`."""
        size = x.element_size()
        num_bytes = x.numel() * size
        row_bytes = num_bytes // max(x.shape[0], 1) if dim == 1 else num_bytes
        if self._rule.all_gather_algorithm(num_bytes, row_bytes, int(x.storage_offset()) * size) is Algorithm.GROUP:
            return self._group.all_gather_into(out, x, dim)
        self._all_gather.all_gather_into(out, x, dim, self._buffers)
        return Algorithm.ONE_SHOT.value

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
        prefetch: torch.Tensor | None = None,
    ) -> tuple[str, torch.Tensor, torch.Tensor] | None:
        """See `Transport.all_reduce_add_rms_norm`: one-shot payloads [T, N] whose rows are multiples of 16 bytes."""
        if self._algorithm(x) is not Algorithm.ONE_SHOT or x.ndim != 2 or x.shape[1] * x.element_size() % ALIGNMENT:
            return None
        done = self._all_reduce.all_reduce_add_rms_norm(
            x, residual.contiguous(), weight, eps, unit_offset, prefetch, self._buffers
        )
        return None if done is None else (Algorithm.ONE_SHOT.value, *done)

    def _algorithm(self, x: torch.Tensor) -> Algorithm:
        size = x.element_size()
        return self._rule.all_reduce_algorithm(x.numel() * size, x.dtype, int(x.storage_offset()) * size)

    def _one_shot(self, x: torch.Tensor) -> None:
        self._all_reduce.all_reduce_(x, self._buffers)

    def _two_shot(self, x: torch.Tensor) -> None:
        shared = self._memory[x.dtype][: x.numel()].view(x.shape)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)
