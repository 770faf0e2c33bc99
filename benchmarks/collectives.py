"""Time of all-reduce, fused all-reduce and norm, and all-gather of logits between ranks of one host, per algorithm.

    python benchmarks/collectives.py --tp 2 [--out benchmarks/results/collectives-tp2-h200.json]

A time is the mean of many calls in one captured graph, as in a decode step, copies into and out of symmetric memory
included. Rank 0 measures. On a CPU the calls run eagerly, which shows only that the benchmark works. The limits of
`TransportRule.measured` were chosen from the table that this prints.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ranks
import results as result_files
import torch
from torch import distributed

from xllm_models.ops import (
    GroupTransport,
    SymmetricTransport,
    Transport,
    TransportRule,
    fused_add_rms_norm,
    group_stats,
)

PAYLOADS = (*(1 << exponent for exponent in range(11, 27)), 112 * 2048)  # bytes; the last is 112 rows of 1024
VOCABULARY = 151936
ROWS = (1, 8, 16, 112)  # of decode steps, padded to graph buckets
CALLS = 56  # per graph: two per layer of 28 layers
BUFFER_BYTES = max(PAYLOADS)
ONE_SHOT_BYTES, GATHER_BYTES = 4 << 20, 18 << 20  # limits of the kernels


class TorchOneShot:
    """torch's one-shot all-reduce, for comparison: two barriers per call, where ours polls for data."""

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(memory, group)
        self._memory = memory.view(torch.bfloat16)
        self._name = group.group_name

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Sum x over the ranks, in place."""
        shared = self._memory[: x.numel()].view(x.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._name, x)


def transports(group: distributed.ProcessGroup, device: torch.device) -> dict[str, Transport]:
    """Each algorithm as a transport that uses no other one, the group's own backend first."""
    own = GroupTransport(group)
    algorithms: dict[str, Transport] = {own.name: own}
    if "symmetric memory" in str(group_stats()["tp"]["transport"]).split(",")[0]:
        for name, one_shot in (("one_shot", ONE_SHOT_BYTES), ("two_shot", 0)):
            rule = TransportRule(
                one_shot_max_bytes=one_shot, two_shot_max_bytes=BUFFER_BYTES, gather_max_bytes=GATHER_BYTES
            )
            algorithms[name] = SymmetricTransport(group, device, rule)
    return algorithms


def measure(context: ranks.RankContext, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per algorithm and payload, on one rank."""
    device = torch.device(context.device)
    group = distributed.group.WORLD
    assert group is not None
    rows = []
    algorithms = transports(group, device)
    sums: dict[str, Callable[[torch.Tensor], object]] = {
        name: transport.all_reduce_ for name, transport in algorithms.items()
    }
    if "one_shot" in algorithms:
        sums["torch_one_shot"] = TorchOneShot(group, device).all_reduce_
    for name, all_reduce_ in sums.items():
        for num_bytes in sorted(map(int, arguments.payloads.split(","))):
            if name == "one_shot" and num_bytes > ONE_SHOT_BYTES:
                continue
            x = torch.full((num_bytes // 2048, 1024), context.tp.rank + 1.0, dtype=torch.bfloat16, device=device)
            _check(all_reduce_, x.clone(), context.tp.size)
            samples = _times(partial(all_reduce_, x), arguments, device)
            rows.append({"kind": "all_reduce", "name": name, "bytes": num_bytes, "us": _summary(samples)})
    return rows + _norms(algorithms, context, arguments) + _logits(algorithms, context, arguments)


def _norms(
    algorithms: dict[str, Transport], context: ranks.RankContext, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All-reduce, residual add and norm: separately, and fused where there is such a kernel."""
    device = torch.device(context.device)
    rows = []
    for num_rows in ROWS:
        x = torch.full((num_rows, 1024), context.tp.rank + 1.0, dtype=torch.bfloat16, device=device)
        residual, weight = torch.ones_like(x), torch.ones(1024, dtype=x.dtype, device=device)
        for name, transport in algorithms.items():
            operands = (residual, weight, 1e-6, False)
            calls = {name: partial(_unfused, transport, x, *operands)}
            fused = partial(transport.all_reduce_add_rms_norm, x, *operands)
            if fused() is not None:
                calls[f"{name}, fused"] = fused
            for label, call in calls.items():
                row = {"kind": "norm", "name": label, "rows": num_rows, "bytes": x.numel() * x.element_size()}
                rows.append(row | {"us": _summary(_times(call, arguments, device))})
    return rows


def _unfused(transport: Transport, x: torch.Tensor, *operands: Any) -> object:
    transport.all_reduce_(x)
    return fused_add_rms_norm(x, *operands)


def _logits(
    algorithms: dict[str, Transport], context: ranks.RankContext, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All-gather of logits along the vocabulary, by the group and, where it is available, by the one-shot kernel."""
    device, size = torch.device(context.device), context.tp.size
    rows = []
    for num_rows in ROWS:
        shape = (num_rows, VOCABULARY // size)
        shard = torch.full(shape, context.tp.rank + 1.0, dtype=torch.bfloat16, device=device)
        for name, transport in algorithms.items():
            if name == "two_shot":  # gathers as one_shot does
                continue
            out = shard.new_empty((num_rows, size * shape[1]))
            joined = partial(transport.all_gather_into, out, shard, 1)
            joined()
            if out.view(num_rows, size, -1).float().mean(dim=2)[0].tolist() != [rank + 1.0 for rank in range(size)]:
                raise RuntimeError(f"{name} gathers wrong values for {num_rows} rows")
            row = {"kind": "logits", "name": name, "rows": num_rows, "bytes": shard.numel() * shard.element_size()}
            rows.append(row | {"us": _summary(_times(joined, arguments, device))})
    return rows


def _check(all_reduce_: Callable[[torch.Tensor], object], x: torch.Tensor, size: int) -> None:
    all_reduce_(x)
    expected = size * (size + 1) / 2
    if not bool((x == expected).all()):
        raise RuntimeError(f"{x.numel() * 2} bytes: the sum is {x.flatten()[:4].tolist()}, not {expected}")


def _times(call: Callable[[], object], arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """Microseconds per call, one sample per run of `CALLS` calls."""
    count = CALLS if device.type == "cuda" else 2

    def several() -> None:
        for _ in range(count):
            call()

    several()
    if device.type != "cuda":
        return [_seconds(several, lambda: None) / count * 1e6 for _ in range(arguments.repeats)]
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        several()
    graph.replay()
    torch.cuda.synchronize(device)
    samples = [_seconds(graph.replay, torch.cuda.synchronize) / count * 1e6 for _ in range(arguments.repeats)]
    graph.reset()
    return samples


def _seconds(work: Callable[[], object], until: Callable[[], object]) -> float:
    distributed.barrier()
    until()
    start = time.perf_counter()
    work()
    until()
    return time.perf_counter() - start


def _summary(samples: list[float]) -> dict[str, Any]:
    return {"median": median(samples), "best": min(samples), "samples": samples}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown tables of all-reduce, of all-reduce with a norm, and of the all-gather of logits, by algorithm."""
    headed = (
        ("all_reduce", "", ""),
        ("norm", "rows of 1024, sum and norm", "rows"),
        ("logits", "rows of logits", "rows"),
    )
    of_kind = {kind: [row for row in rows if row["kind"] == kind] for kind, _, _ in headed}
    return "\n".join(_side_by_side(of_kind[kind], heading, key) for kind, heading, key in headed if of_kind[kind])


def _side_by_side(rows: list[dict[str, Any]], heading: str, key: str) -> str:
    """A table with a column per algorithm and a line per number of bytes, after another key if there is one."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    times = {(row["name"], row["bytes"]): row["us"]["median"] for row in rows}
    keys = dict.fromkeys((*([row[key]] if key else []), row["bytes"]) for row in sorted(rows, key=_bytes))
    columns = [*([heading] if key else []), "bytes of a rank", *(f"{name}, us" for name in names)]
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join(["---"] * len(columns)) + " |"]
    for line in keys:
        cells = [f"{times[name, line[-1]]:.1f}" if (name, line[-1]) in times else "-" for name in names]
        lines.append("| " + " | ".join([*map(str, line), *cells]) + " |")
    return "\n".join(lines) + "\n"


def _bytes(row: dict[str, Any]) -> int:
    return int(row["bytes"])


def main(command: list[str] | None = None) -> None:
    """Measures and prints the table; writes a result file where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--payloads", default=",".join(map(str, PAYLOADS)), help="bytes, with commas between them")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command)
    options = ranks.Options(device=arguments.device, timeout_s=300)
    outcome = ranks.launch(measure, arguments, arguments.tp, options)
    rows = outcome.values[0]
    print(table(rows), end="")
    if arguments.out is not None:
        measured = {"tp": arguments.tp, "dtype": "bfloat16", "calls": CALLS, "rows": rows}
        result_files.write(arguments.out, benchmark="collectives", device=arguments.device, results=measured)


if __name__ == "__main__":
    main()
