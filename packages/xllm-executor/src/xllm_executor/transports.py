"""Chooses the collectives' transport of a process group: once when it starts, and the same on every rank.

Ranks exchange a `RankInfo` each, and decide from all of them. The transports are in `xllm_models.ops`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from xllm_models.ops import GroupTransport, SymmetricTransport, Transport, TransportRule, missing_requirements

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # distinguishes hosts of the same name


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank's host and device, as exchanged between ranks.

    Attributes:
        host: host name and boot id of the rank's system.
        device: the UUID of the rank's GPU; for other devices, the device type.
        refusal: why this rank cannot use symmetric memory; empty if it can.
    """

    host: str
    device: str
    refusal: str


def local_rank_info(device: torch.device, *, allowed: bool) -> RankInfo:
    """This rank's info; `allowed` is False where the host switches symmetric memory off."""
    on_cuda = device.type == "cuda"
    refusal = ""
    if not allowed:
        refusal = "symmetric memory is switched off"
    elif not on_cuda:
        refusal = f"device {device.type} has no symmetric memory"
    elif missing := missing_requirements():
        refusal = f"there is no {', '.join(missing)}"
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    return RankInfo(
        host=f"{socket.gethostname()} {boot}",
        device=str(torch.cuda.get_device_properties(device).uuid) if on_cuda else device.type,
        refusal=refusal,
    )


def why_not_symmetric(infos: Sequence[RankInfo]) -> str:
    """Why these ranks cannot use symmetric memory; empty if they can try. Every rank gets the same result."""
    if len(infos) < 2:
        return "there is one rank"
    for rank, info in enumerate(infos):
        if info.refusal:
            return f"rank {rank}: {info.refusal}"
        if info.host != infos[0].host:
            return f"rank {rank} is on another host than rank 0"
    devices = [info.device for info in infos]
    for rank, device in enumerate(devices):
        if (first := devices.index(device)) != rank:
            return f"ranks {first} and {rank} share one device"
    return ""


def choose_transport(
    group: distributed.ProcessGroup, store: Any, device: torch.device, *, allowed: bool = True
) -> tuple[Transport, str]:
    """Chooses the group's transport. Returns it and a line that names it and the reason. All ranks call it together.

    Args:
        group: the ranks.
        store: a c10d store of the group's ranks, with a prefix of its own; its timeout bounds the wait.
        device: of this rank.
        allowed: False selects the group's own backend (NCCL, gloo), whatever the devices support.

    Raises:
        RuntimeError: a rank did not send its info in time.
    """
    rank, size = group.rank(), group.size()
    own = GroupTransport(group)
    infos = _exchange(store, "rank_info", rank, size, asdict(local_rank_info(device, allowed=allowed)))
    refusal = why_not_symmetric([RankInfo(**info) for info in infos])
    if refusal:
        return own, f"{own.name}, because {refusal}"
    rule = TransportRule.measured(size)
    symmetric: Transport = own
    problem = ""
    try:
        symmetric = SymmetricTransport(group, device, rule)
    except RuntimeError as error:  # most often: no peer access
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    # A second exchange: if one rank failed, no rank may use symmetric memory.
    for failed_rank, failure in enumerate(_exchange(store, "symmetric", rank, size, problem)):
        if failure:
            return own, f"{own.name}, because rank {failed_rank} could not share memory: {failure}"
    return symmetric, (
        f"symmetric memory, sums one-shot up to {rule.one_shot_max_bytes} bytes, two-shot up to "
        f"{rule.two_shot_max_bytes}, gathers up to {rule.gather_max_bytes}, then {own.name}"
    )


def _exchange(store: Any, stage: str, rank: int, size: int, value: object) -> list[Any]:
    """Exchanges one value per rank through the store. Returns all of them, by rank."""
    store.set(f"transport/{stage}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"transport/{stage}/{other}")) for other in range(size)]
