"""Joins and leaves the process group of one model's tensor-parallel ranks.

The host serves the store where ranks meet. Models find the group by the name `tp`. Sharding and collectives are in
`xllm_models`, the choice of the all-reduce transport in `.transports`.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed

from xllm_models import TensorParallel
from xllm_models.ops import register_group, unregister_group

from .transports import choose_transport

_NAME = "tp"
_joined = False


def join(
    *,
    rank: int,
    size: int,
    host: str,
    port: int,
    prefix: str,
    backend: str,
    device: str,
    timeout: float,
    symmetric_memory: bool = True,
) -> str:
    """Joins the other ranks. Returns the group's name in c10d's registry, by which C++ finds it too.

    Args:
        rank, size: of this process in the group.
        host, port: of a c10d TCPStore that another process serves, such as torchrun's agent.
        prefix: of this group's keys in that store.
        backend: "gloo", "nccl", ...; empty takes nccl for CUDA devices and gloo for others.
        device: of this rank's tensors.
        timeout: longest wait for other ranks in seconds, here and in each collective.
        symmetric_memory: whether all-reduces may use it where all devices have it. `xllm_models.ops.group_stats` gives
            the transport and the reason for it.

    Raises:
        ValueError: a rank outside of the group.
        RuntimeError: a rank did not join in time, or this process is in a group. A failed join leaves no group.
    """
    global _joined
    TensorParallel(rank=rank, size=size)
    if distributed.is_initialized():
        raise RuntimeError("this process is in a process group already; leave it before joining another")
    limit = timedelta(seconds=timeout)
    store = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    rank_device = torch.device(device)
    if rank_device.type == "cuda":
        if ":" not in device:
            rank_device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(rank_device)  # kernels of the group and of symmetric memory use the current device
    group_store = distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    distributed.init_process_group(
        backend or ("nccl" if rank_device.type == "cuda" else "gloo"),
        store=group_store,
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    group = distributed.group.WORLD
    assert group is not None
    try:
        transport, description = choose_transport(group, group_store, rank_device, allowed=symmetric_memory)
        register_group(_NAME, group, transport, description=description)
    except BaseException:
        distributed.destroy_process_group()
        raise
    _joined = True
    name: str = group.group_name
    return name


def leave() -> None:
    """Destroys the group that `join` made, if any. Release the graphs that captured its collectives first."""
    global _joined
    if _joined:
        _joined = False
        unregister_group(_NAME)
        distributed.destroy_process_group()
