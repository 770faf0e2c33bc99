"""Tensor parallelism under graphs: ranks choose alike, whether collectives are captured or cut out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("cut_ops", "graphs"),
    [("", {"piecewise": 3, "decode_graph": 1}), ("xllm::all_reduce_", {"piecewise": 8})],
    ids=["captured", "cut"],
)
def test_two_ranks(tmp_path: Path, cut_ops: str, graphs: dict[str, int]) -> None:
    """Two layers: two cuts at attention, and with the collectives five more, the embedding's among them."""
    script = Path(__file__).with_name("rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", tmp_path / "rendezvous", cut_ops],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    first, second = (json.loads(output) for output, _ in outputs)
    assert first == second
    assert set(first["steps"]) == set(graphs)
    assert first["graphs"] == graphs
