"""Number of ops per decode step besides the graph: each launch costs microseconds of a step of about a millisecond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Counts dispatched ops. A view costs the host about a microsecond, an op that writes several."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("live", "ops"),
    [
        (8, {"_foreach_copy_": 2}),  # one for the device, one for the host mirrors
        (5, {"_foreach_copy_": 2, "slice": 2, "copy_": 1}),  # plus the last offsets on the device and the host padding
    ],
)
def test_ops_of_a_fill(make_setup: Callable[..., Any], live: int, ops: dict[str, int]) -> None:
    """A step of a size that was filled before, at other addresses."""
    setup = make_setup()
    harness = setup.harness
    requests = [harness.add() for _ in range(live)]
    for number in requests:
        harness.step((number, 2))
    for _ in range(2):
        metadata, tokens, positions = harness._build([(number, 1) for number in requests])
        with Ops() as mode:
            setup.decode._fill(tokens, positions, metadata, 8, tokens)
    assert mode.counts == ops
    with Ops() as mode:
        setup.decode._fill(tokens, positions, metadata, 8, tokens, host=False)
    assert mode.counts == {"_foreach_copy_": 1} | {name: ops[name] for name in ("slice",) if name in ops}
