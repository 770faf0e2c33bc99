"""Collective ops in a group of one; `models/test_tensor_parallel.py` has them among several ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode

from xllm_attention.op_library import collective_ops
from xllm_models import ops


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[str]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    world = distributed.group.WORLD
    assert world is not None
    ops.register_group("alone", world)
    yield "alone"
    ops.unregister_group("alone")
    distributed.destroy_process_group()


@pytest.mark.parametrize("rows", [0, 3])
def test_collectives_keep_their_schemas_and_fakes(group_of_one: str, rows: int) -> None:
    x = torch.randn(rows, 4)
    torch.library.opcheck(torch.ops.xllm.all_reduce_.default, (x.clone(), group_of_one))
    torch.library.opcheck(torch.ops.xllm.all_gather.default, (x, 1, group_of_one))
    torch.library.opcheck(torch.ops.xllm.all_gather.default, (x, 1, group_of_one, 1))
    operands = (torch.randn(rows, 4), torch.randn(4), 1e-6, False)
    torch.library.opcheck(torch.ops.xllm.all_reduce_add_rms_norm_.default, (x.clone(), *operands, group_of_one))
    torch.library.opcheck(torch.ops.xllm.reduce_scatter.default, (x, 1, group_of_one))
    torch.library.opcheck(torch.ops.xllm.broadcast_.default, (x.clone(), 0, group_of_one))
    assert torch.equal(ops.all_reduce_(x.clone(), group_of_one), x)
    assert torch.equal(ops.all_gather(x, 1, group_of_one), x)
    assert torch.equal(ops.all_gather(x, 1, group_of_one, dim=1), x)
    for found, expected in zip(
        ops.all_reduce_add_rms_norm_(x.clone(), *operands, group_of_one),
        ops.fused_add_rms_norm(x, *operands),
        strict=True,
    ):
        assert torch.equal(found, expected)
    assert torch.equal(ops.reduce_scatter(x, 1, group_of_one), x)
    assert torch.equal(ops.broadcast_(x.clone(), 0, group_of_one), x)


def test_every_op_that_takes_a_group_is_marked_as_a_collective() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("xllm::")]
    with_group = {schema.name for schema in schemas if any(argument.name == "group" for argument in schema.arguments)}
    assert len(with_group) >= 5
    assert with_group <= collective_ops()


def test_another_number_of_ranks_is_refused(group_of_one: str) -> None:
    with pytest.raises(ValueError, match="'alone' has 1 ranks, not 2"):
        ops.all_gather(torch.zeros(1), 2, group_of_one)
    with pytest.raises(ValueError, match="'alone' has 1 ranks, not 2"):
        ops.reduce_scatter(torch.zeros(2), 2, group_of_one)


def test_a_dimension_that_is_not_gathered_is_refused(group_of_one: str) -> None:
    for x, dim in ((torch.zeros(2), 1), (torch.zeros(2, 2, 2), 2), (torch.zeros(2), -1)):
        with pytest.raises(ValueError, match=f"all_gather along dimension {dim} of "):
            ops.all_gather(x, 1, group_of_one, dim)


def test_traffic_counts_calls_and_bytes(group_of_one: str) -> None:
    before = ops.traffic()
    ops.all_reduce_(torch.zeros(3, 4), group_of_one)
    ops.all_reduce_(torch.zeros(0, 4), group_of_one)
    ops.all_gather(torch.zeros(5, dtype=torch.bfloat16), 1, group_of_one)
    moved = {
        name: (calls - before.get(name, (0, 0))[0], num_bytes - before.get(name, (0, 0))[1])
        for name, (calls, num_bytes) in ops.traffic().items()
    }
    assert (moved["all_reduce"], moved["all_gather"]) == ((2, 48), (1, 10))


RANK = """
import sys

import torch
from torch import distributed

from xllm_models import ops

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
ops.register_group("tp", distributed.group.WORLD)
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (10.0**rank)
assert ops.reduce_scatter(x, 2, "tp").tolist() == [[11.0, 22.0], [33.0, 44.0]][rank : rank + 1]
gathered = ops.all_gather(x, 2, "tp", dim=1)
assert gathered.tolist() == [[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 40.0]]
assert ops.all_gather(x[:1], 2, "tp", dim=1).tolist() == [[1.0, 2.0, 10.0, 20.0]]
assert ops.all_gather(x[:1], 2, "tp").tolist() == [[1.0, 2.0], [10.0, 20.0]]
operands = (torch.ones(2, 2), torch.tensor([1.0, 2.0]), 1e-6, False)
found = ops.all_reduce_add_rms_norm_(x.clone(), *operands, "tp")
expected = ops.fused_add_rms_norm(torch.tensor([[11.0, 22.0], [33.0, 44.0]]), *operands)
assert all(torch.equal(one, other) for one, other in zip(found, expected))
assert ops.broadcast_(x.clone(), 1, "tp").tolist() == [[10.0, 20.0], [30.0, 40.0]]
assert ops.broadcast_(x.clone(), 0, "tp").tolist() == [[1.0, 2.0], [3.0, 4.0]]
ops.unregister_group("tp")
distributed.destroy_process_group()
"""


def test_collectives_between_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "rendezvous")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_rows_that_do_not_divide_by_the_ranks_are_refused() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="needs rows that divide by them, got 3"):
        ops.reduce_scatter(torch.zeros(3), 2, "any")


def test_a_group_must_be_registered_and_only_once(group_of_one: str) -> None:
    with pytest.raises(RuntimeError, match="no process group named 'other'"):
        ops.all_reduce_(torch.zeros(1), "other")
    world = distributed.group.WORLD
    assert world is not None
    with pytest.raises(ValueError, match="'alone' is registered already"):
        ops.register_group("alone", world)
    with pytest.raises(ValueError, match="'other' is not registered"):
        ops.unregister_group("other")
