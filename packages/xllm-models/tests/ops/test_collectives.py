"""Collective ops in a group of one; `models/test_tensor_parallel.py` has them among several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

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
    assert torch.equal(ops.all_reduce_(x.clone(), group_of_one), x)
    assert torch.equal(ops.all_gather(x, 1, group_of_one), x)


def test_all_gather_refuses_another_number_of_ranks(group_of_one: str) -> None:
    with pytest.raises(ValueError, match="'alone' has 1 ranks, not 2"):
        ops.all_gather(torch.zeros(1), 2, group_of_one)


def test_a_group_must_be_registered_and_only_once(group_of_one: str) -> None:
    with pytest.raises(RuntimeError, match="no process group named 'other'"):
        ops.all_reduce_(torch.zeros(1), "other")
    world = distributed.group.WORLD
    assert world is not None
    with pytest.raises(ValueError, match="'alone' is registered already"):
        ops.register_group("alone", world)
    with pytest.raises(ValueError, match="'other' is not registered"):
        ops.unregister_group("other")
