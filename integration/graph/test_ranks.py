"""Tensor parallel graphs: equal dispatch on all ranks, collectives captured or cut, tokens, a rank that dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CAPTURED = {"piecewise": 3, "decode_graph": 1}
CUT = {"piecewise": 7}
ALL_TWO_SHOT = {"one_shot_max_bytes": 0, "two_shot_max_bytes": 1 << 20, "gather_max_bytes": 1 << 20}
ALL_BY_GROUP = {"one_shot_max_bytes": 0, "two_shot_max_bytes": 16, "gather_max_bytes": 0}
CUDA = pytest.mark.multi_gpu


@pytest.fixture
def run(load: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """`run(work, options, device=..., backend=...)`: runs a function of rank.py on two ranks; returns the outcome."""
    ranks, rank = load("ranks"), load("rank")

    def run(work: str, options: dict[str, Any], *, device: str = "cpu", backend: str = "") -> Any:
        how = ranks.Options(device=device, backend=backend, timeout_s=120)
        return ranks.launch(getattr(rank, work), options, 2, how)

    return run


@pytest.mark.parametrize(
    ("device", "cut_collectives", "rule", "graphs", "algorithms"),
    [
        pytest.param("cpu", False, None, CAPTURED, ["gloo"], id="cpu-captured"),
        pytest.param("cpu", True, None, CUT, ["gloo"], id="cpu-cut"),
        pytest.param("cuda", False, None, CAPTURED, ["nccl", "one_shot"], id="cuda-by-rule", marks=CUDA),
        pytest.param("cuda", False, ALL_TWO_SHOT, CAPTURED, ["nccl", "two_shot"], id="cuda-two-shot", marks=CUDA),
        pytest.param("cuda", False, ALL_BY_GROUP, CAPTURED, ["nccl"], id="cuda-nccl", marks=CUDA),
        pytest.param("cuda", True, None, CUT, ["nccl", "one_shot"], id="cuda-cut", marks=CUDA),
    ],
)
def test_two_ranks_conform(
    run: Callable[..., Any],
    device: str,
    cut_collectives: bool,
    rule: dict[str, int] | None,
    graphs: dict[str, int],
    algorithms: list[str],
) -> None:
    """Two layers: two cuts at attention, and with the collectives five more. The first is the embedding's, the last
    ends the model.

    In a step without tokens, the group's own backend synchronizes the ranks.
    """
    outcome = run("conforms", {"cut_collectives": cut_collectives, "rule": rule}, device=device)
    first, second = outcome.values
    assert first == second
    assert set(first["steps"]) == set(graphs)
    assert first["graphs"] == graphs
    assert first["algorithms"] == algorithms
    assert outcome.end_s < 10


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_ranks_end_when_one_is_killed_in_mid_step(run: Callable[..., Any], tmp_path: Path, device: str) -> None:
    when = tmp_path / "when"
    with pytest.raises(RuntimeError, match=r"rank 1 is gone: killed by signal 9 \(Killed\)"):
        run("dies", {"when": str(when)}, device=device)
    assert time.monotonic() - float(when.read_text()) < 15


def test_ranks_end_when_their_launcher_is_killed(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    who = tmp_path / "who"
    rank, ranks = load("rank"), load("ranks")
    launcher = get_context("spawn").Process(
        target=ranks.launch, args=(rank.waits, {"who": str(who)}, 1, ranks.Options(device="cpu"))
    )
    launcher.start()
    _wait_until(lambda: who.is_file() and who.read_text() != "")
    launcher.kill()
    launcher.join()
    _wait_until(lambda: not _runs(int(who.read_text())))


def _wait_until(true: Callable[[], bool], limit_s: float = 30) -> None:
    limit = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.05)


def _runs(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda:0", id="one-device", marks=pytest.mark.gpu),
        pytest.param("cuda", id="two-devices", marks=CUDA),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_two_ranks_are_those_of_one(
    load: Callable[[str], ModuleType], record_property: Callable[[str, object], None], device: str, dtype: str
) -> None:
    """fp32: all tokens are equal. In bf16 another order of sums may turn a near tie; the report names the margins.

    Ranks on one device sum over gloo, which no graph holds: piecewise graphs leave the collectives out.
    """
    command = f"--device {device} --dtype {dtype} --attention torch --batches 1,3,8 --input-len 32 --output-len 24"
    modes = "eager,piecewise" if device == "cuda:0" else "eager,graph,piecewise"
    command += f" --tp 1,2 --repeats 1 --shape small --modes {modes}"
    if device == "cuda:0":
        command += " --tp-backend gloo --cut-collectives"
    sweep = load("sweep")
    measured = sweep.run(sweep.parse(command.split()))
    two = measured["groups"][1]["stats"]
    expected = (
        "gloo, because ranks 0 and 1 share one device" if device == "cuda:0" else "symmetric memory, sums one-shot"
    )
    assert two["eager"]["groups"]["tp"]["transport"].startswith(expected)
    assert set(two["piecewise"]["steps"]) == {"piecewise"}
    for row in measured["rows"]:
        what = f"{dtype} tp {row['tp']} {row['mode']} B={row['batch']}"
        assert row["ranks_alike"], what
        if row["tp"] == 1:
            continue
        equal, margin = row["sequences_equal_to_one_rank"], row["largest_margin_at_a_parting"]
        record_property("parity", f"{what}: {equal}/{row['batch']} answers as of one rank, margins up to {margin}")
        if dtype == "float32":
            assert equal == row["batch"], f"{what}: margin {margin}"
            assert row["sequences_equal_to_eager"] in (None, row["batch"]), what
        else:
            assert margin is None or margin < 0.25, what
