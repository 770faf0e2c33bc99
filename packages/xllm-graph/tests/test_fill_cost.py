"""How much a decode step enqueues beside its graph: each launch costs microseconds of a step of a millisecond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WRITES = ("copy_", "fill_", "zero_", "_foreach_copy_")


class Writes(TorchDispatchMode):
    """Counts the ops that write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WRITES:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("live", "writes"),
    [
        (8, {"copy_": 3, "_foreach_copy_": 1}),  # three host mirrors, all on the device at once
        (5, {"copy_": 3 + 3, "_foreach_copy_": 1}),  # and tails: of all offsets on the device, on the host, a mirror
    ],
)
def test_writes_of_a_fill(make_setup: Callable[..., Any], live: int, writes: dict[str, int]) -> None:
    setup = make_setup()
    world = setup.world
    requests = [world.add() for _ in range(live)]
    for number in requests:
        world.step((number, 2))
    metadata, tokens, positions = world._build([(number, 1) for number in requests])
    with Writes() as mode, torch.no_grad():
        setup.decode._fill(tokens, positions, metadata, 8, tokens)
    assert mode.counts == writes
