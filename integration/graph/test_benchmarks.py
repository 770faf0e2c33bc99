"""The sweep, its table and the comparison; the sweep's steps equal those of the reference builder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xllm_metadata import FIELDS, build_attention_metadata, validate


@pytest.mark.parametrize(("first", "count"), [(0, 20), (20, 1), (0, 1), (16, 16), (31, 2)])
def test_steps_equal_the_reference_builders(load: Any, first: int, count: int) -> None:
    batch = load("batch")
    builder = batch.StepBuilder(max_num_seqs=5, max_len=40, device=torch.device("cpu"))
    requests = slice(1, 4)
    tokens = np.arange(3 * count, dtype=np.int32).reshape(3, count)
    step = builder.build(requests, first, tokens)
    tables = builder._tables[requests].tolist()
    lens = ([count] * 3, [first + count] * 3)
    expected = build_attention_metadata(*lens, tables, batch.PAGE_SIZE, state_slots=[1, 2, 3])
    for field in FIELDS:
        ours, theirs = getattr(step.metadata, field.name), getattr(expected, field.name)
        if isinstance(theirs, torch.Tensor):
            assert ours.tolist() == theirs.tolist(), field.name
        elif field.name not in ("is_prefill", "is_chunked_prefill"):  # a prompt of one token is decode to the builder
            assert ours == theirs, field.name
    assert step.tokens.tolist() == list(range(3 * count))
    assert step.positions.tolist() == [*range(first, first + count)] * 3
    assert step.logits_indices.tolist() == [count - 1, 2 * count - 1, 3 * count - 1]
    validate(step.metadata, num_tokens=3 * count, num_seqs=3, num_pages=builder.num_pages, page_size=batch.PAGE_SIZE)


def test_a_step_is_built_while_the_device_is_at_the_one_before(load: Any) -> None:
    builder = load("batch").StepBuilder(max_num_seqs=2, max_len=40, device=torch.device("cpu"))
    sampled = torch.tensor([7, 8], dtype=torch.int32)
    before = builder.build(slice(0, 2), 20, np.array([[5], [6]], dtype=np.int32))
    step = builder.build(slice(0, 2), 21, sampled)
    assert step.tokens is sampled  # read when the device comes to them
    assert (before.tokens.tolist(), before.positions.tolist()) == ([5, 6], [20, 20])
    assert (step.positions.tolist(), step.metadata.kv_seq_lens_host.tolist()) == ([21, 21], [0, 22, 44])
    again = builder.build(slice(0, 2), 22, np.array([[9], [9]], dtype=np.int32))
    assert again.positions.data_ptr() == before.positions.data_ptr()
    assert again.tokens.tolist() == [9, 9]


def _ties(num_rows: int, vocabulary: int, device: str) -> torch.Tensor:
    """Logits of few values, so that many are the largest; one row has nothing but -inf."""
    logits = torch.randint(-3, 3, (num_rows, vocabulary), generator=torch.manual_seed(0)).to(torch.bfloat16)
    logits[-1] = -torch.inf
    return logits.to(device)


@pytest.mark.parametrize("vocabulary", [1, 17, 2048, 40000])
def test_the_likeliest_token_is_picked(load: Any, vocabulary: int) -> None:
    greedy = load("greedy")
    logits = _ties(3, vocabulary, "cpu")
    scratch = (torch.zeros(3, greedy.PARTS), torch.zeros(3, greedy.PARTS, dtype=torch.int32))
    arrived, tokens, on_host = torch.zeros(3, dtype=torch.int32), *torch.empty((2, 3), dtype=torch.int32)
    for _ in range(2):
        greedy.pick(logits.float(), tokens, on_host, *scratch, arrived)  # the interpreter has no bfloat16
        assert tokens.tolist()[:2] == logits.argmax(-1).tolist()[:2]
        assert 0 <= tokens[2] < vocabulary
        assert on_host.tolist() == tokens.tolist()
    sample = greedy.Greedy(4, torch.device("cpu"))
    first = sample(logits, slice(1, 4), 0)
    second = sample(logits.neg().flip(0), slice(1, 4), 1)
    assert first.wait().tolist() == logits.argmax(-1).tolist()
    assert second.wait().tolist() == sample.last(slice(1, 4)).tolist() == logits.neg().flip(0).argmax(-1).tolist()


@pytest.mark.gpu
def test_the_likeliest_token_is_picked_on_a_device(load: Any) -> None:
    sample = load("greedy").Greedy(100, torch.device("cuda"))
    for index, num_rows in enumerate((100, 1)):
        logits = _ties(num_rows + 1, 151936, "cuda")[:-1]
        picked = sample(logits, slice(0, num_rows), index).wait().tolist()
        assert picked == sample.last(slice(0, num_rows)).tolist() == logits.argmax(-1).tolist()


def test_a_small_sweep_its_table_and_a_comparison(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "sweep.json"
    command = "--device cpu --batches 1,3 --input-len 20 --output-len 4 --repeats 2 --out"
    load("sweep").main([*command.split(), str(result)])
    document = json.loads(result.read_text())
    assert {"device", "versions", "commit", "command", "date"} <= set(document["stamp"])
    rows = document["results"]["rows"]
    assert [(row["mode"], row["batch"]) for row in rows] == [
        (mode, batch) for mode in ("eager", "graph", "overlapped", "piecewise") for batch in (1, 3)
    ]
    assert [row["sequences_equal_to_eager"] for row in rows] == [None, None, 1, 3, 1, 3, 1, 3]
    assert all(row["repeatable"] for row in rows)
    stats = document["results"]["stats"]
    assert set(stats["eager"]["steps"]) == {"eager"}
    assert set(stats["graph"]["steps"]) == {"decode_graph", "piecewise"}
    assert set(stats["piecewise"]["steps"]) == {"piecewise"}

    capsys.readouterr()
    load("table").main([str(result)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| B | TTFT eager | TTFT decode graph | TTFT overlapped | TTFT piecewise | TPOT eager")
    assert lines[-3].startswith("| 3 | ")
    assert lines[-3].endswith("| 3/3, 3/3, 3/3 |")
    assert lines[-1].startswith("Memory of 20 decode graphs: 1.")

    load("table").main([str(result), "--out", str(tmp_path / "table.md"), "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "table.md").read_text().splitlines() == lines
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    slower = json.loads(result.read_text())
    for row in slower["results"]["rows"]:
        if row["mode"] == "graph" and row["batch"] == 3:
            row["tpot_ms"]["samples"] = [sample * 1000 for sample in row["tpot_ms"]["samples"]]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(slower))
    compare = load("compare")
    assert compare.main([str(result), str(result), "--check"]) == 0
    capsys.readouterr()
    assert compare.main([str(result), str(other), "--check"]) == 1
    flagged = [line for line in capsys.readouterr().out.splitlines() if line.endswith("slower |")]
    assert len(flagged) == 1
    assert flagged[0].startswith("| rows[tp=1, mode=graph, batch=3].tpot_ms |")
    assert compare.main([str(other), str(result), "--check"]) == 0  # faster is no failure


def test_results_name_no_folder_of_a_machine(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = load("results").ROOT / "benchmarks"
    inside = folder / "results" / "sweep.json"
    monkeypatch.setattr("sys.argv", [str(folder / "sweep.py"), "--out", str(tmp_path / "out.json"), str(inside)])
    assert load("results").stamp("cpu")["command"] == (
        "python benchmarks/sweep.py --out out.json benchmarks/results/sweep.json"
    )


def test_ranks_are_swept_compared_and_tabled(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "sweep.json"
    command = "--device cpu --tp 1,2 --batches 1,3 --modes eager,graph --input-len 20 --output-len 4 --repeats 1 --out"
    load("sweep").main([*command.split(), str(result)])
    measured = json.loads(result.read_text())["results"]
    rows = measured["rows"]
    assert [(row["tp"], row["mode"], row["batch"]) for row in rows] == [
        (tp, mode, batch) for tp in (1, 2) for mode in ("eager", "graph", "overlapped") for batch in (1, 3)
    ]
    assert all(row["ranks_alike"] and row["repeatable"] for row in rows)
    assert [row["sequences_equal_to_eager"] for row in rows] == [None, None, 1, 3, 1, 3] * 2
    assert [row["sequences_equal_to_one_rank"] for row in rows] == [None] * 6 + [1, 3] * 3
    assert [group["tp"] for group in measured["groups"]] == [1, 2]
    assert measured["groups"][1]["end_s"] < 10

    capsys.readouterr()
    load("table").main([str(result)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(
        "| B | TTFT TP=1 eager | TTFT TP=1 decode graph | TTFT TP=1 overlapped | TTFT TP=2 eager |"
    )
    assert lines[5].endswith("| 3/3, 3/3, 3/3, 3/3 |")
    assert lines[7] == "- TP=2 eager, B=1: 1 of 1 answers equal those of TP=1."
    assert lines[-1].startswith("- TP=2: all ranks had the same tokens: yes. Graphs, group and processes ended within ")


def test_collectives_are_measured_and_tabled(load: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = tmp_path / "collectives.json"
    load("collectives").main(["--device", "cpu", "--repeats", "1", "--payloads", "2048,4096", "--out", str(result)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| bytes of a rank | gloo, us |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| 2048", "| 4096"]
    rows = json.loads(result.read_text())["results"]["rows"]
    assert [row["rows"] for row in rows if row["kind"] == "logits"] == [1, 8, 16, 112]


def test_the_tables_of_the_pages_are_those_of_the_results(load: Any) -> None:
    tables = load("page_tables")
    for path in tables.PAGES:
        page = path.read_text()
        assert tables.filled(page) == page, path.name


def test_a_run_of_tests_becomes_a_result(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite time="2.5"><testcase classname="a" name="one"><properties>'
        '<property name="parity" value="3/3"/></properties></testcase>'
        '<testcase classname="a" name="two"><failure/></testcase></testsuite></testsuites>'
    )
    assert load("tested").summary(report) == {
        "outcomes": {"passed": 1, "failure": 1}, "seconds": 2.5, "not_passed": ["a::two"], "modules": {"a": 1},
        "notes": ["one: 3/3"],
    }  # fmt: skip
    monkeypatch.setenv("XLLM_COMMIT", "abc")
    assert load("results").stamp("cpu")["commit"] == "abc"
    result = tmp_path / "tests-some-part-cpu.json"
    monkeypatch.setattr("sys.argv", ["tested.py", str(report), "--device", "cpu", "--out", str(result)])
    load("tested").main()
    line = load("tested").table([result]).splitlines()[-1]
    assert line.startswith("| some-part | 1 | 1 | ")
    assert line.endswith(" | abc |")
