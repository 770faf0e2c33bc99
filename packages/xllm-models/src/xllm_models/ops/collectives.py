"""Collectives inside a model, as ops over torch.distributed.

Owns the ops and the names they find their process groups by. Creating a process group, and the choice of its
transport, belongs to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import distributed

from .library import define_op

# torch 2.13 renamed it and deprecated the old name.
_gather_into: Callable[..., object] = getattr(
    distributed, "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
)
_groups: dict[str, distributed.ProcessGroup] = {}


def register_group(name: str, group: distributed.ProcessGroup) -> None:
    """Let the collectives of this process find `group` under `name`. A name in use is a ValueError."""
    if name in _groups:
        raise ValueError(f"process group {name!r} is registered already")
    _groups[name] = group


def unregister_group(name: str) -> None:
    """Forget the group `name`, before it is destroyed. An unknown name is a ValueError."""
    if _groups.pop(name, None) is None:
        raise ValueError(f"process group {name!r} is not registered")


def _group(name: str) -> distributed.ProcessGroup:
    if name not in _groups:
        raise RuntimeError(f"no process group named {name!r}: call xllm_models.ops.register_group first")
    return _groups[name]


def _all_reduce_torch(x: torch.Tensor, group: str) -> None:
    distributed.all_reduce(x, group=_group(group))


def _all_reduce_fake(x: torch.Tensor, group: str) -> None:
    return None


def _all_gather_torch(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    process_group = _group(group)
    if process_group.size() != num_ranks:
        raise ValueError(f"process group {group!r} has {process_group.size()} ranks, not {num_ranks}")
    out = x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))
    _gather_into(out, x.contiguous(), group=process_group)
    return out


def _all_gather_fake(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))


_all_reduce = define_op("all_reduce_(Tensor(a!) x, str group) -> ()", _all_reduce_torch, _all_reduce_fake)
_all_gather = define_op("all_gather(Tensor x, int num_ranks, str group) -> Tensor", _all_gather_torch, _all_gather_fake)


def all_reduce_(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum x over the ranks of `group`, in place (x contiguous); returns x. An unknown group is a RuntimeError."""
    _all_reduce(x, group)
    return x


def all_gather(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """The ranks' x one after another along dimension 0: [N, ...] -> [num_ranks * N, ...], rank 0 first."""
    return cast(torch.Tensor, _all_gather(x, num_ranks, group))
