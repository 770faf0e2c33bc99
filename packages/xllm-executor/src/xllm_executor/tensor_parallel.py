"""The process group of the ranks that share one model.

Owns its start over a store that the host serves, its name for models (`tp`) and its end. How the ranks find each other,
and what they agree on, belongs to the host; sharding and collectives to `xllm_models`; the choice of what carries an
all-reduce to `.transports`.
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
    """Meet the other ranks; returns the name of the group in c10d's registry, where C++ finds it too.

    Args:
        rank, size: this process's place.
        host, port: a c10d TCPStore that some process serves, torchrun's agent for example.
        prefix: keeps this group's keys apart from others in that store.
        backend: "gloo", "nccl", ...; empty takes nccl for CUDA devices and gloo for others.
        device: of this rank's tensors.
        timeout: seconds that a rank waits for the others, here and in each collective.
        symmetric_memory: take it for all-reduces where the devices of all ranks have it; what was taken, and why, is in
            `xllm_models.ops.group_stats`.

    Raises:
        ValueError: a place outside of the group.
        RuntimeError: the others did not come in time, or a group exists. No group is left of a join that failed.
    """
    global _joined
    TensorParallel(rank=rank, size=size)
    if distributed.is_initialized():
        raise RuntimeError("this process is in a process group already; leave it before joining another")
    limit = timedelta(seconds=timeout)
    store = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    place = torch.device(device)
    if place.type == "cuda":
        if ":" not in device:
            place = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(place)  # where the group's kernels run, and those of symmetric memory
    own = distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    distributed.init_process_group(
        backend or ("nccl" if place.type == "cuda" else "gloo"),
        store=own,
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    world = distributed.group.WORLD
    assert world is not None
    try:
        transport, description = choose_transport(world, own, place, allowed=symmetric_memory)
        register_group(_NAME, world, transport, description=description)
    except BaseException:
        distributed.destroy_process_group()
        raise
    _joined = True
    name: str = world.group_name
    return name


def leave() -> None:
    """End the group that `join` made, if any. Graphs that hold its collectives must be gone."""
    global _joined
    if _joined:
        _joined = False
        unregister_group(_NAME)
        distributed.destroy_process_group()
