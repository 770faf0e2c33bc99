"""The choice of a transport: its conditions, and that all ranks choose the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import distributed

from xllm_executor import transports
from xllm_executor.transports import RankInfo, choose_transport, local_rank_info, why_not_symmetric
from xllm_models.ops import TransportRule

FIRST = RankInfo(host="a", device="gpu 0", refusal="")
SECOND = replace(FIRST, device="gpu 1")


@pytest.mark.parametrize(
    ("infos", "reason"),
    [
        ([FIRST, SECOND], ""),
        ([FIRST], "there is one rank"),
        ([FIRST, FIRST], "ranks 0 and 1 share one device"),
        ([FIRST, SECOND, FIRST], "ranks 0 and 2 share one device"),
        ([FIRST, replace(FIRST, host="b")], "rank 1 is on another host than rank 0"),
        ([FIRST, replace(SECOND, refusal="no")], "rank 1: no"),
        ([replace(FIRST, refusal="never"), replace(SECOND, refusal="no")], "rank 0: never"),
    ],
)
def test_reasons_against_symmetric_memory(infos: list[RankInfo], reason: str) -> None:
    assert why_not_symmetric(infos) == reason


def test_local_rank_info(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert local_rank_info(cpu, allowed=True).refusal == "device cpu has no symmetric memory"
    assert local_rank_info(cpu, allowed=False).refusal == "symmetric memory is switched off"
    assert local_rank_info(cpu, allowed=True).host == local_rank_info(cpu, allowed=False).host
    monkeypatch.setattr(transports, "missing_requirements", lambda: ("triton",))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"uuid": "u"}))
    info = local_rank_info(torch.device("cuda:0"), allowed=True)
    assert info.refusal == "there is no triton"
    assert info.device == "u"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process group's rank and size."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


class Own:
    """Stands in for `GroupTransport`."""

    name = "nccl"

    def __init__(self, group: Member) -> None:
        self.group = group


Choose = Callable[..., list[tuple[Any, str]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """`choose(infos, make)`: what each rank chooses; `make(group)` stands in for `SymmetricTransport`."""

    def choose(infos: Sequence[RankInfo], make: Callable[[Member], object]) -> list[tuple[Any, str]]:
        monkeypatch.setattr(transports, "GroupTransport", Own)
        monkeypatch.setattr(transports, "SymmetricTransport", lambda group, device, rule: make(group))
        monkeypatch.setattr(transports, "local_rank_info", lambda device, allowed: infos[device.index])
        store = distributed.HashStore()
        members = [Member(number=rank, count=len(infos)) for rank in range(len(infos))]
        with ThreadPoolExecutor(len(infos)) as pool:
            return list(pool.map(lambda m: choose_transport(m, store, torch.device("cuda", m.number)), members))

    return choose


def test_ranks_that_can_share_memory_do(choose: Choose) -> None:
    rule = TransportRule.measured(2)
    choices = choose([FIRST, SECOND], lambda group: f"symmetric {group.number}")
    assert len(choices) == 2
    for rank, (transport, description) in enumerate(choices):
        assert transport == f"symmetric {rank}"
        assert description == (
            f"symmetric memory, sums one-shot up to {rule.one_shot_max_bytes} bytes, two-shot up to "
            f"{rule.two_shot_max_bytes}, gathers up to {rule.gather_max_bytes}, then nccl"
        )


def test_one_ranks_info_decides_for_all_before_any_memory_is_made(choose: Choose) -> None:
    def never(group: Member) -> object:
        raise AssertionError

    choices = choose([FIRST, SECOND, FIRST], never)
    assert len(choices) == 3
    for transport, description in choices:
        assert isinstance(transport, Own)
        assert description == "nccl, because ranks 0 and 2 share one device"


def test_one_rank_that_fails_to_share_memory_keeps_all_from_it(choose: Choose) -> None:
    def make(group: Member) -> object:
        if group.number == 1:
            raise RuntimeError("peer access is not supported\nand more")
        return "symmetric"

    choices = choose([FIRST, SECOND], make)
    assert len(choices) == 2
    for transport, description in choices:
        assert isinstance(transport, Own)
        assert description == "nccl, because rank 1 could not share memory: peer access is not supported"
