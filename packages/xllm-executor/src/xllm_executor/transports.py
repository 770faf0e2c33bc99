"""Which transport the ranks of a group use, decided once, at their start, and alike on all of them.

Owns the infos that each rank tells of itself, the decision, and its wording. The transports are `xllm_models.ops`'s.
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

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells hosts apart whose names are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank tells the others about its device.

    Attributes:
        host: the system that the rank runs on.
        device: names the physical device within it.
        refusal: why this rank cannot use symmetric memory; empty when nothing is against it.
    """

    host: str
    device: str
    refusal: str


def local_rank_info(device: torch.device, *, allowed: bool) -> RankInfo:
    """This rank's infos; `allowed` is False where the host wants no symmetric memory."""
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
    """Why ranks with these infos cannot share memory; empty when they may try. The same on all ranks."""
    if len(infos) < 2:
        return "there is one rank"
    for rank, told in enumerate(infos):
        if told.refusal:
            return f"rank {rank}: {told.refusal}"
        if told.host != infos[0].host:
            return f"rank {rank} is on another host than rank 0"
    places = [told.device for told in infos]
    for rank, place in enumerate(places):
        if (first := places.index(place)) != rank:
            return f"ranks {first} and {rank} share one device"
    return ""


def choose_transport(
    group: distributed.ProcessGroup, store: Any, device: torch.device, *, allowed: bool = True
) -> tuple[Transport, str]:
    """The transport of the group and a line that says which it is and why. Called by all its ranks at once.

    Args:
        group: the ranks.
        store: a c10d store that they share, with keys of its own; its timeout bounds the wait.
        device: of this rank.
        allowed: False for the group's own backend whatever the devices can do.

    Raises:
        RuntimeError: a rank did not tell its infos in time.
    """
    rank, size = group.rank(), group.size()
    own = GroupTransport(group)
    told = _exchange(store, "infos", rank, size, asdict(local_rank_info(device, allowed=allowed)))
    refusal = why_not_symmetric([RankInfo(**infos) for infos in told])
    if refusal:
        return own, f"{own.name}, for {refusal}"
    rule = TransportRule.measured(size)
    made: Transport = own
    problem = ""
    try:
        made = SymmetricTransport(group, device, rule)
    except RuntimeError as error:  # without peer access, above all
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    for other, trouble in enumerate(_exchange(store, "made", rank, size, problem)):
        if trouble:
            return own, f"{own.name}, for rank {other} could not share memory: {trouble}"
    return made, (
        f"symmetric memory, sums one-shot up to {rule.one_shot_max_bytes} bytes, two-shot up to "
        f"{rule.two_shot_max_bytes}, gathers up to {rule.gather_max_bytes}, then {own.name}"
    )


def _exchange(store: Any, stage: str, rank: int, size: int, value: object) -> list[Any]:
    """Every rank's value, by rank."""
    store.set(f"transport/{stage}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"transport/{stage}/{other}")) for other in range(size)]
