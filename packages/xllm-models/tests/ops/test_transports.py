"""What carries an all-reduce: the rule, the registration, and the calls of symmetric memory, its kernels replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import _symmetric_memory

from xllm_models import ops
from xllm_models.kernels import all_reduce
from xllm_models.ops import AllReduceRule, SymmetricTransport, Way, symmetric

RULE = AllReduceRule(one_shot_max_bytes=256, two_shot_max_bytes=1024)
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("num_bytes", "dtype", "offset", "way"),
    [
        (16, BF16, 0, Way.ONE_SHOT),
        (256, BF16, 0, Way.ONE_SHOT),
        (272, F32, 0, Way.TWO_SHOT),
        (1024, F32, 32, Way.TWO_SHOT),
        (1040, F32, 0, Way.GROUP),  # larger than the buffer
        (0, BF16, 0, Way.GROUP),
        (256, F16, 0, Way.GROUP),  # no kernel
        (256, torch.int32, 0, Way.GROUP),
        (24, BF16, 0, Way.GROUP),  # off the alignment
        (256, BF16, 8, Way.GROUP),
    ],
)
def test_the_rule(num_bytes: int, dtype: torch.dtype, offset: int, way: Way) -> None:
    assert RULE.way(num_bytes, dtype, offset) is way


def test_the_measured_rule_shrinks_one_shot_with_the_ranks() -> None:
    two, four, eight = (AllReduceRule.measured(ranks) for ranks in (2, 4, 8))
    assert two.one_shot_max_bytes // 3 - four.one_shot_max_bytes in range(16)
    assert two.one_shot_max_bytes // 7 - eight.one_shot_max_bytes in range(16)
    assert two.two_shot_max_bytes == eight.two_shot_max_bytes
    # Decode steps of usual sizes are one-shot: 16 rows of 1024 in bf16.
    assert two.way(16 * 1024 * 2, BF16) is Way.ONE_SHOT
    with pytest.raises(ValueError, match="a group of 1 has nothing to sum"):
        AllReduceRule.measured(1)


@pytest.mark.parametrize(("one_shot", "two_shot"), [(-1, 4), (8, 4)])
def test_limits_that_do_not_rise_are_refused(one_shot: int, two_shot: int) -> None:
    with pytest.raises(ValueError, match=f"one_shot_max_bytes is {one_shot}, two_shot_max_bytes 4; they must rise"):
        AllReduceRule(one_shot_max_bytes=one_shot, two_shot_max_bytes=two_shot)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[distributed.ProcessGroup]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    world = distributed.group.WORLD
    assert world is not None
    yield world
    distributed.destroy_process_group()


class Doubling:
    """As if there were another rank with the same values."""

    def all_reduce_(self, x: torch.Tensor) -> str:
        x.mul_(2)
        return "doubled"


def test_the_op_takes_the_transport_of_its_group(group: distributed.ProcessGroup) -> None:
    ops.register_group("plain", group)
    ops.register_group("doubled", group, Doubling(), remark="for a test")
    before = ops.traffic().get("all_reduce", (0, 0))
    try:
        assert ops.all_reduce_(torch.ones(3), "plain").tolist() == [1, 1, 1]
        assert ops.all_reduce_(torch.ones(3), "doubled").tolist() == [2, 2, 2]
        assert torch.ops.xllm.all_reduce_(torch.ones(3), "doubled") is None
        stats = ops.group_stats()
        assert stats["plain"] == {
            "num_ranks": 1, "backend": "gloo", "all_reduce_ways": {"gloo": 1}, "transport": ""
        }  # fmt: skip
        assert stats["doubled"] == {
            "num_ranks": 1, "backend": "gloo", "all_reduce_ways": {"doubled": 2}, "transport": "for a test"
        }  # fmt: skip
        assert ops.traffic()["all_reduce"] == (before[0] + 3, before[1] + 3 * 12)
    finally:
        ops.unregister_group("plain")
        ops.unregister_group("doubled")
    assert ops.group_stats() == {}


@pytest.fixture
def shared(group: distributed.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """`SymmetricTransport` works on the CPU: one-shot gives three times the input, two-shot five times.

    Is the memory that was shared, and the channels that one-shot was called with.
    """
    seen: list[Any] = []
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(
        _symmetric_memory, "empty", lambda size, dtype, device: torch.full((size,), 7, dtype=dtype, device=device)
    )

    def rendezvous(tensor: torch.Tensor, with_group: distributed.ProcessGroup) -> Any:
        assert with_group is group
        assert not tensor.any()
        seen.append(tensor)
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr()])

    def one_shot(x: torch.Tensor, channels: all_reduce.Channels) -> None:
        seen.append(channels)
        x.mul_(3)

    def two_shot(input: torch.Tensor, reduce_op: str, group_name: str, output: torch.Tensor) -> torch.Tensor:
        assert (reduce_op, group_name) == ("sum", group.group_name)
        return output.copy_(input * 5)

    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(all_reduce, "one_shot", one_shot)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("two_shot_all_reduce_out", two_shot, "CPU")
    yield seen
    library._destroy()


def test_symmetric_memory_takes_the_way_of_the_rule(group: distributed.ProcessGroup, shared: list[Any]) -> None:
    transport = SymmetricTransport(group, torch.device("cpu"), RULE)
    for shape, dtype, way, factor in (
        ((4, 32), BF16, "one_shot", 3),
        ((4, 64), BF16, "two_shot", 5),
        ((8, 32), F32, "two_shot", 5),
        ((8, 64), F32, "gloo", 1),
        ((4, 32), F16, "gloo", 1),
        ((0, 32), F32, "gloo", 1),
    ):
        x = torch.randn(shape).to(dtype)
        expected = x * factor
        assert transport.all_reduce_(x) == way
        assert torch.equal(x, expected)
    rows = torch.arange(12.0).reshape(3, 4)
    assert transport.all_reduce_(rows[1]) == "one_shot"
    assert rows.tolist() == [[0, 1, 2, 3], [12, 15, 18, 21], [8, 9, 10, 11]]
    memory, channels, again = shared
    assert channels is again
    assert memory.numel() == RULE.two_shot_max_bytes + all_reduce.shared_bytes(1)
    assert channels.rank == 0
    assert channels.addresses.tolist() == [memory.data_ptr() + RULE.two_shot_max_bytes]
    assert not channels.counts.any()


def test_multicast_is_not_set_up(group: distributed.ProcessGroup, shared: list[Any]) -> None:
    SymmetricTransport(group, torch.device("cpu"), RULE)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_a_rule_beyond_the_kernel_is_refused(group: distributed.ProcessGroup) -> None:
    rule = AllReduceRule(one_shot_max_bytes=2 << 20, two_shot_max_bytes=2 << 20)
    with pytest.raises(ValueError, match="one_shot_max_bytes is 2097152; at most 1048576 are served"):
        SymmetricTransport(group, torch.device("cpu"), rule)
    for ranks in (2, 3, 8):
        assert AllReduceRule.measured(ranks).one_shot_max_bytes <= all_reduce.MAX_BYTES


def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.lacking() == ()
    monkeypatch.setattr(symmetric, "find_spec", lambda name: None)
    assert ops.lacking() == ("triton",)
