"""Collectives inside a model, as ops over torch.distributed.

Owns the ops, the registry of process groups by name, and the counts of calls and bytes. The host creates the process
group and chooses its transport; the transport moves the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import distributed

from xllm_attention.op_library import define_op

from .norm import fused_add_rms_norm
from .transports import GroupTransport, Transport

# torch 2.13 renamed the function and deprecated the old name.
_reduce_scatter_into: Callable[..., object] = getattr(
    distributed, "reduce_scatter_single" if hasattr(distributed, "reduce_scatter_single") else "reduce_scatter_tensor"
)


@dataclass(slots=True, kw_only=True)
class _Group:
    """One registered group."""

    process_group: distributed.ProcessGroup
    transport: Transport
    description: str  # of the transport
    all_reduce_algorithms: Counter[str] = field(default_factory=Counter)  # calls by algorithm
    all_gather_algorithms: Counter[str] = field(default_factory=Counter)


_groups: dict[str, _Group] = {}
_traffic: dict[str, list[int]] = {}  # name of the op to [calls, bytes]


def register_group(
    name: str, group: distributed.ProcessGroup, transport: Transport | None = None, *, description: str = ""
) -> None:
    """Register `group` under `name` for the collectives of this process. A name in use is a ValueError.

    `transport` runs all-reduces and all-gathers, with the same class on all ranks; None is torch.distributed's own.
    `description` of the transport, such as why it was chosen, goes into `group_stats`.
    """
    if name in _groups:
        raise ValueError(f"process group {name!r} is registered already")
    _groups[name] = _Group(process_group=group, transport=transport or GroupTransport(group), description=description)


def unregister_group(name: str) -> None:
    """Remove the group `name` and its transport, before the group is destroyed. An unknown name is a ValueError."""
    if _groups.pop(name, None) is None:
        raise ValueError(f"process group {name!r} is not registered")


def group_stats() -> dict[str, dict[str, object]]:
    """Number of ranks, backend, calls by algorithm and transport of each registered group.

    A collective inside a captured device graph counts when it is captured, not when it is replayed.
    """
    return {
        name: {
            "num_ranks": group.process_group.size(),
            "backend": distributed.get_backend(group.process_group),
            "all_reduce_algorithms": dict(group.all_reduce_algorithms),
            "all_gather_algorithms": dict(group.all_gather_algorithms),
            "transport": group.description,
        }
        for name, group in _groups.items()
    }


def _registered(name: str) -> _Group:
    if name not in _groups:
        raise RuntimeError(f"no process group named {name!r}: call xllm_models.ops.register_group first")
    return _groups[name]


def _group(name: str) -> distributed.ProcessGroup:
    return _registered(name).process_group


def traffic() -> dict[str, tuple[int, int]]:
    """Calls and input bytes of this rank's collectives since the process started, by op: (calls, bytes).

    A collective inside a captured device graph counts when it is captured, not when it is replayed.
    """
    return {name: (calls, num_bytes) for name, (calls, num_bytes) in _traffic.items()}


def _count(name: str, x: torch.Tensor) -> None:
    counts = _traffic.setdefault(name, [0, 0])
    counts[0] += 1
    counts[1] += x.numel() * x.element_size()


def _group_of(name: str, num_ranks: int) -> distributed.ProcessGroup:
    group = _group(name)
    if group.size() != num_ranks:
        raise ValueError(f"process group {name!r} has {group.size()} ranks, not {num_ranks}")
    return group


def _sum_in_place(x: torch.Tensor, group: _Group) -> None:
    _count("all_reduce", x)
    group.all_reduce_algorithms[group.transport.all_reduce_(x)] += 1


@define_op(mutates=["x"], collective=True)
def _all_reduce_(x: torch.Tensor, group: str) -> None:
    _sum_in_place(x, _registered(group))


def all_reduce_(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum x over the ranks of `group`, in place (x contiguous); returns x. An unknown group is a RuntimeError."""
    _all_reduce_(x, group)
    return x


@define_op(mutates=["x"], collective=True)
def all_reduce_add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    group: str,
    prefetch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_rms_norm` of the sum of x over the ranks of `group`, bit-equal to `all_reduce_` and then that.

    x [..., N] contiguous; its values after the call are undefined. One kernel where the group's transport has one.
    """
    registered = _registered(group)
    done = registered.transport.all_reduce_add_rms_norm(x, residual, weight, eps, unit_offset, prefetch)
    if done is None:
        _sum_in_place(x, registered)
        return fused_add_rms_norm(x, residual, weight, eps, unit_offset, prefetch)
    _count("all_reduce", x)
    algorithm, normed, total = done
    registered.all_reduce_algorithms[algorithm] += 1
    return normed, total


def _all_gather_fake(x: torch.Tensor, num_ranks: int, group: str, dim: int = 0) -> torch.Tensor:
    if not 0 <= dim < min(x.ndim, 2):
        raise ValueError(f"all_gather along dimension {dim} of {list(x.shape)}; it must be 0, or 1 where there is one")
    return x.new_empty((*x.shape[:dim], num_ranks * x.shape[dim], *x.shape[dim + 1 :]))


@define_op(fake=_all_gather_fake, collective=True)
def all_gather(x: torch.Tensor, num_ranks: int, group: str, dim: int = 0) -> torch.Tensor:
    """Concatenation of the ranks' x along dimension `dim`, rank 0 first: [N, ...] -> [num_ranks * N, ...] for 0.

    A dimension other than 0 and 1 is a ValueError.
    """
    _group_of(group, num_ranks)
    out = _all_gather_fake(x, num_ranks, group, dim)
    registered = _registered(group)
    _count("all_gather", x)
    registered.all_gather_algorithms[registered.transport.all_gather_into(out, x.contiguous(), dim)] += 1
    return out


def _reduce_scatter_fake(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    if x.shape[0] % num_ranks:
        raise ValueError(f"reduce_scatter over {num_ranks} ranks needs rows that divide by them, got {x.shape[0]}")
    return x.new_empty((x.shape[0] // num_ranks, *x.shape[1:]))


@define_op(fake=_reduce_scatter_fake, collective=True)
def reduce_scatter(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Sum of x over the ranks; rank r keeps the r-th part of the rows: [num_ranks * N, ...] -> [N, ...].

    A number of rows that is not divisible by `num_ranks` is a ValueError.
    """
    process_group = _group_of(group, num_ranks)
    out = _reduce_scatter_fake(x, num_ranks, group)
    _count("reduce_scatter", x)
    _reduce_scatter_into(out, x.contiguous(), group=process_group)
    return out


@define_op(mutates=["x"], collective=True)
def _broadcast_(x: torch.Tensor, source: int, group: str) -> None:
    process_group = _group(group)
    _count("broadcast", x)
    distributed.broadcast(x, group=process_group, group_src=source)


def broadcast_(x: torch.Tensor, source: int, group: str) -> torch.Tensor:
    """Copy x of rank `source` of the group to x of all ranks, in place (x contiguous); returns x."""
    _broadcast_(x, source, group)
    return x
