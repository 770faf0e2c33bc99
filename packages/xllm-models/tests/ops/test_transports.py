"""Transports: the rule, their registration, and the calls of symmetric memory with its kernels replaced by stubs."""

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
from xllm_models.kernels import lamport_all_reduce, symmetric_all_gather
from xllm_models.kernels.symmetric_buffers import (
    GATHER_MAX_BYTES,
    SENTINEL,
    SUM_MAX_BYTES,
    SymmetricBuffers,
    buffer_bytes,
)
from xllm_models.ops import Algorithm, SymmetricTransport, TransportRule, symmetric

RULE = TransportRule(one_shot_max_bytes=256, two_shot_max_bytes=1024, gather_max_bytes=512)
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("num_bytes", "dtype", "offset", "algorithm"),
    [
        (16, BF16, 0, Algorithm.ONE_SHOT),
        (256, BF16, 0, Algorithm.ONE_SHOT),
        (272, F32, 0, Algorithm.TWO_SHOT),
        (1024, F32, 32, Algorithm.TWO_SHOT),
        (1040, F32, 0, Algorithm.GROUP),  # larger than the buffer
        (0, BF16, 0, Algorithm.GROUP),
        (256, F16, 0, Algorithm.GROUP),  # no kernel
        (256, torch.int32, 0, Algorithm.GROUP),
        (24, BF16, 0, Algorithm.GROUP),  # off the alignment
        (256, BF16, 8, Algorithm.GROUP),
    ],
)
def test_the_rule(num_bytes: int, dtype: torch.dtype, offset: int, algorithm: Algorithm) -> None:
    assert RULE.all_reduce_algorithm(num_bytes, dtype, offset) is algorithm


@pytest.mark.parametrize(
    ("num_bytes", "row_bytes", "offset", "algorithm"),
    [
        (512, 512, 32, Algorithm.ONE_SHOT),
        (512, 64, 0, Algorithm.ONE_SHOT),
        (528, 528, 0, Algorithm.GROUP),
        (0, 0, 0, Algorithm.GROUP),
        (24, 24, 0, Algorithm.GROUP),
        (256, 256, 8, Algorithm.GROUP),
        (48, 24, 0, Algorithm.GROUP),  # rows that are no multiple of 16 bytes
    ],
)
def test_the_rule_for_gathers(num_bytes: int, row_bytes: int, offset: int, algorithm: Algorithm) -> None:
    assert RULE.all_gather_algorithm(num_bytes, row_bytes, offset) is algorithm


def test_the_measured_rule_shrinks_one_shot_with_the_ranks() -> None:
    two, four, eight = (TransportRule.measured(ranks) for ranks in (2, 4, 8))
    assert two.one_shot_max_bytes // 3 - four.one_shot_max_bytes in range(16)
    assert two.one_shot_max_bytes // 7 - eight.one_shot_max_bytes in range(16)
    assert two.two_shot_max_bytes == eight.two_shot_max_bytes
    # Decode steps of usual sizes are one-shot: 16 rows of 1024 in bf16.
    assert two.all_reduce_algorithm(16 * 1024 * 2, BF16) is Algorithm.ONE_SHOT
    with pytest.raises(ValueError, match="a group of 1 has nothing to sum"):
        TransportRule.measured(1)


@pytest.mark.parametrize("num_ranks", range(2, 10))
def test_two_shot_is_for_the_numbers_of_ranks_that_torch_can(num_ranks: int) -> None:
    rule = TransportRule.measured(num_ranks)
    assert rule.all_reduce_algorithm(rule.one_shot_max_bytes, BF16) is Algorithm.ONE_SHOT
    beyond = Algorithm.TWO_SHOT if num_ranks in (2, 4, 8) else Algorithm.GROUP
    assert rule.all_reduce_algorithm(rule.one_shot_max_bytes + 16, BF16) is beyond
    assert rule.all_reduce_algorithm(16 << 20, BF16) is beyond


@pytest.mark.parametrize(("one_shot", "two_shot"), [(-1, 4), (8, 4)])
def test_limits_that_do_not_rise_are_refused(one_shot: int, two_shot: int) -> None:
    with pytest.raises(ValueError, match=f"one_shot_max_bytes is {one_shot}, two_shot_max_bytes 4; they must rise"):
        TransportRule(one_shot_max_bytes=one_shot, two_shot_max_bytes=two_shot, gather_max_bytes=0)


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="gather_max_bytes is -16; it must be at least 0"):
        TransportRule(one_shot_max_bytes=0, two_shot_max_bytes=0, gather_max_bytes=-16)


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

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, dim: int) -> str:
        out.copy_(x + 1)
        return "raised"

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
        prefetch: torch.Tensor | None = None,
    ) -> tuple[str, torch.Tensor, torch.Tensor] | None:
        return None if unit_offset else ("fused", x - 1, residual - 1)


def test_the_op_takes_the_transport_of_its_group(group: distributed.ProcessGroup) -> None:
    ops.register_group("plain", group)
    ops.register_group("doubled", group, Doubling(), description="for a test")
    before = ops.traffic().get("all_reduce", (0, 0))
    try:
        assert ops.all_reduce_(torch.ones(3), "plain").tolist() == [1, 1, 1]
        assert ops.all_reduce_(torch.ones(3), "doubled").tolist() == [2, 2, 2]
        assert torch.ops.xllm.all_reduce_(torch.ones(3), "doubled") is None
        assert ops.all_gather(torch.ones(3), 1, "plain").tolist() == [1, 1, 1]
        assert ops.all_gather(torch.ones(3), 1, "doubled").tolist() == [2, 2, 2]
        stats = ops.group_stats()
        assert stats["plain"] == {
            "num_ranks": 1, "backend": "gloo", "all_reduce_algorithms": {"gloo": 1},
            "all_gather_algorithms": {"gloo": 1}, "transport": "",
        }  # fmt: skip
        assert stats["doubled"] == {
            "num_ranks": 1, "backend": "gloo", "all_reduce_algorithms": {"doubled": 2},
            "all_gather_algorithms": {"raised": 1}, "transport": "for a test",
        }  # fmt: skip
        assert ops.traffic()["all_reduce"] == (before[0] + 3, before[1] + 3 * 12)
        # Without a fused kernel in the transport: its all-reduce, then the norm.
        x, residual, weight = torch.ones(1, 4), torch.zeros(1, 4), torch.ones(4)
        normed, total = ops.all_reduce_add_rms_norm_(x, residual, weight, 0.0, False, "doubled")
        assert (normed.tolist(), total.tolist()) == ([[0.0] * 4], [[-1.0] * 4])
        normed, total = ops.all_reduce_add_rms_norm_(x, residual, weight, 0.0, True, "doubled")
        assert (normed.tolist(), total.tolist()) == ([[2.0] * 4], [[2.0] * 4])
        assert ops.group_stats()["doubled"]["all_reduce_algorithms"] == {"doubled": 3, "fused": 1}
        assert ops.traffic()["all_reduce"] == (before[0] + 5, before[1] + 3 * 12 + 2 * 16)
    finally:
        ops.unregister_group("plain")
        ops.unregister_group("doubled")
    assert ops.group_stats() == {}


@pytest.fixture
def shared(group: distributed.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """`SymmetricTransport` works on the CPU: one-shot gives three times the input, two-shot five times.

    Yields the symmetric memory, then the buffers of each one-shot call.
    """
    seen: list[Any] = []
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(
        _symmetric_memory, "empty", lambda size, dtype, device: torch.full((size,), 7, dtype=dtype, device=device)
    )

    def rendezvous(tensor: torch.Tensor, with_group: distributed.ProcessGroup) -> Any:
        assert with_group is group
        assert not tensor[: RULE.two_shot_max_bytes].any()
        assert set(tensor.unique().tolist()) <= {0, SENTINEL}  # initialized before a peer may write
        seen.append(tensor)
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr()])

    def one_shot(x: torch.Tensor, buffers: SymmetricBuffers) -> None:
        seen.append(buffers)
        x.mul_(3)

    def gather(out: torch.Tensor, x: torch.Tensor, dim: int, buffers: SymmetricBuffers) -> None:
        seen.append(buffers)
        out.copy_(x + 7 + dim)

    def one_shot_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
        prefetch: torch.Tensor | None,
        buffers: SymmetricBuffers,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        seen.append(buffers)
        return None if unit_offset else (x * 2, residual * 2)

    def two_shot(input: torch.Tensor, reduce_op: str, group_name: str, output: torch.Tensor) -> torch.Tensor:
        assert (reduce_op, group_name) == ("sum", group.group_name)
        return output.copy_(input * 5)

    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(lamport_all_reduce, "all_reduce_", one_shot)
    monkeypatch.setattr(symmetric_all_gather, "all_gather_into", gather)
    monkeypatch.setattr(lamport_all_reduce, "all_reduce_add_rms_norm", one_shot_norm)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("two_shot_all_reduce_out", two_shot, "CPU")
    yield seen
    library._destroy()


def test_symmetric_memory_uses_the_algorithm_of_the_rule(group: distributed.ProcessGroup, shared: list[Any]) -> None:
    transport = SymmetricTransport(group, torch.device("cpu"), RULE)
    for shape, dtype, algorithm, factor in (
        ((4, 32), BF16, "one_shot", 3),
        ((4, 64), BF16, "two_shot", 5),
        ((8, 32), F32, "two_shot", 5),
        ((8, 64), F32, "gloo", 1),
        ((4, 32), F16, "gloo", 1),
        ((0, 32), F32, "gloo", 1),
    ):
        x = torch.randn(shape).to(dtype)
        expected = x * factor
        assert transport.all_reduce_(x) == algorithm
        assert torch.equal(x, expected)
    rows = torch.arange(12.0).reshape(3, 4)
    assert transport.all_reduce_(rows[1]) == "one_shot"
    assert rows.tolist() == [[0, 1, 2, 3], [12, 15, 18, 21], [8, 9, 10, 11]]
    out = torch.empty(32)
    assert transport.all_gather_into(out, torch.zeros(32), 0) == "one_shot"
    assert out.tolist() == [7] * 32
    assert transport.all_gather_into(out.view(4, 8), torch.zeros(4, 8), 1) == "one_shot"
    assert out.tolist() == [8] * 32
    assert transport.all_gather_into(out[:24].view(4, 6), torch.ones(4, 6), 1) == "gloo"  # rows of 24 bytes
    assert out.tolist() == [1] * 24 + [8] * 8
    out = torch.empty(512)
    assert transport.all_gather_into(out, torch.ones(512), 0) == "gloo"
    assert out.tolist() == [1] * 512
    memory, buffers, *again = shared
    assert [one is buffers for one in again] == [True] * 3
    assert memory.numel() == RULE.two_shot_max_bytes + buffer_bytes(1)
    assert buffers.rank == 0
    assert buffers.addresses.tolist() == [memory.data_ptr() + RULE.two_shot_max_bytes]
    assert not buffers.counts.any()


def test_norms_are_fused_with_one_shot_sums_of_whole_rows(group: distributed.ProcessGroup, shared: list[Any]) -> None:
    transport = SymmetricTransport(group, torch.device("cpu"), RULE)
    weight = torch.ones(8)
    x, residual = torch.ones(2, 8), torch.arange(16.0).view(8, 2).t()[:, :8]
    done = transport.all_reduce_add_rms_norm(x, residual, weight, 1e-6, False)
    assert done is not None
    assert done[0] == "one_shot"
    assert torch.equal(done[1], x * 2)
    assert torch.equal(done[2], residual * 2)
    assert transport.all_reduce_add_rms_norm(x, residual, weight, 1e-6, True) is None  # the kernel returns None
    for refused in (torch.ones(8), torch.ones(3, 6), torch.ones(0, 8), torch.ones(9, 8), torch.ones(2, 8).half()):
        assert transport.all_reduce_add_rms_norm(refused, refused, weight, 1e-6, False) is None
        assert bool((refused == 1).all())
    assert len(shared) == 3


def test_multicast_is_not_set_up(group: distributed.ProcessGroup, shared: list[Any]) -> None:
    SymmetricTransport(group, torch.device("cpu"), RULE)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.parametrize(
    ("one_shot", "gather", "message"),
    [
        (8 << 20, 0, "one_shot_max_bytes is 8388608; at most 4194304 are served"),
        (0, 32 << 20, "gather_max_bytes is 33554432; at most 18874368 are served"),
    ],
)
def test_a_rule_beyond_the_kernels_is_refused(
    group: distributed.ProcessGroup, one_shot: int, gather: int, message: str
) -> None:
    rule = TransportRule(one_shot_max_bytes=one_shot, two_shot_max_bytes=8 << 20, gather_max_bytes=gather)
    with pytest.raises(ValueError, match=message):
        SymmetricTransport(group, torch.device("cpu"), rule)
    for ranks in (2, 3, 8):
        assert TransportRule.measured(ranks).one_shot_max_bytes <= SUM_MAX_BYTES
        assert TransportRule.measured(ranks).gather_max_bytes <= GATHER_MAX_BYTES


def test_missing_requirements_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.missing_requirements() == ()
    monkeypatch.setattr(symmetric, "find_spec", lambda name: None)
    assert ops.missing_requirements() == ("triton",)
