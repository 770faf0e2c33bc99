"""TTFT and TPOT over batch sizes: eager, full decode graphs with piecewise prefill, and everything piecewise.

    python benchmarks/sweep.py [--batches 1,8,16,100] [--tp 1,2] [--out benchmarks/results/sweep-h200.json]
    python benchmarks/table.py benchmarks/results/sweep-h200.json

A batch is a number of prompts of equal length that all arrive at the start. TTFT is the time until the host has the
first token of every prompt. TPOT is the time of the tokens after the first, divided by their number. Weights are
random, sampling is greedy. On a CPU a small model runs on recorded graphs, which shows only that the benchmark works.

The host reads the tokens of every step before it builds the next step. Mode `overlapped` uses the executor of mode
`graph` with overlapped scheduling: the host builds and submits a step while the device runs the previous one. The step
reads its tokens from the sampler's device buffer; the host reads them later.

With `--tp` the same is measured on that number of tensor-parallel ranks, one process and device each, or all on one
device where `--device` has an index. Every rank has all logits and samples for itself; rank 0 measures.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ranks
import results as result_files
import torch
from batch import PAGE_SIZE, StepBuilder
from greedy import Greedy, Picked
from model import SHAPES, random_model

from xllm_executor import ModelExecutor
from xllm_graph import sequence_buckets
from xllm_metadata import allocate_caches
from xllm_models import TensorParallel

OVERLAPPED = "overlapped"
MODES = {"eager": ("eager",), "graph": ("graph", OVERLAPPED), "piecewise": ("piecewise",)}  # rows of each executor
DEFAULTS = {  # device type -> defaults of the options
    "cuda": {"shape": "qwen3-0.6b", "batches": "1,8,16,100", "input_len": 1024, "output_len": 256, "dtype": "bfloat16"},
    "cpu": {"shape": "small", "batches": "1,3,8", "input_len": 48, "output_len": 12, "dtype": "float32"},
}
TOKENS_PER_STEP = 8192


class Bench:
    """One model or one rank's shard of it, one set of caches, and the executors of the modes."""

    def __init__(self, arguments: argparse.Namespace, context: ranks.RankContext | None = None) -> None:
        context = context or ranks.RankContext(tp=TensorParallel(), device=arguments.device)
        self.arguments = arguments
        self.device = torch.device(context.device)
        self.leads = context.tp.rank == 0
        self.batches = [int(part) for part in arguments.batches.split(",")]
        self.max_len = arguments.input_len + arguments.output_len
        self.model = random_model(arguments.shape, self.device, getattr(torch, arguments.dtype), context.tp)
        self.builder = StepBuilder(max_num_seqs=max(self.batches), max_len=self.max_len, device=self.device)
        self._sample = Greedy(max(self.batches), self.device)
        self.caches = allocate_caches(
            self.model.cache_specs, num_pages=self.builder.num_pages, page_size=PAGE_SIZE, device=self.device,
            num_slots=max(self.batches),
        )  # fmt: skip
        vocabulary = SHAPES[arguments.shape]["vocab_size"]
        shape = (max(self.batches), arguments.input_len)
        self.prompts = np.random.default_rng(1).integers(0, vocabulary, shape, dtype=np.int32)

    @contextmanager
    def executor(self, mode: str, **more: object) -> Iterator[ModelExecutor]:
        """A warmed-up executor of the mode; further options override those of the mode."""
        on_cuda = self.device.type == "cuda"
        options: dict[str, object] = {
            "python_graph_backend": {"eager": "off", "graph": "cudagraphs" if on_cuda else "recorded"}.get(mode, mode),
            "attention_backend": self.arguments.attention,
            "max_tokens_per_batch": TOKENS_PER_STEP,
            "max_model_len": self.max_len,
            "eager_is_error": True,
            "progress": self.leads,
            "graph_cut_collectives": self.arguments.cut_collectives,
        }
        options |= more
        if mode == "piecewise" and not on_cuda:
            options["graph_runtime"] = "recorded"
        executor = ModelExecutor(self.model, options, max(self.batches))
        executor.bind_kv_caches(self.caches)
        executor.warmup()
        try:
            yield executor
        finally:
            executor.shutdown()
            del executor
            gc.collect()

    @torch.no_grad()
    def generate(
        self, executor: ModelExecutor, batch: int, *, overlap: bool = False, margins: np.ndarray | None = None
    ) -> tuple[float, float, np.ndarray]:
        """Runs one batch: (TTFT in s, TPOT in s, tokens [batch, output_len]).

        Args:
            executor: of a mode, see `executor`.
            batch: prompts.
            overlap: submit a step while the device runs the previous one.
            margins: [batch, output_len], filled with the largest logit less the second; this distorts the times.
        """
        arguments = self.arguments
        out = np.empty((arguments.output_len, batch), dtype=np.int32).T  # column-major: a step's tokens are contiguous
        unread: deque[tuple[slice, int, Picked]] = deque()

        def read(left: int) -> None:
            """Reads tokens, the oldest step first, until `left` steps are unread."""
            while len(unread) > left:
                rows, index, picked = unread.popleft()
                out[rows, index] = picked.wait()

        every = slice(0, batch)
        per_step = max(1, TOKENS_PER_STEP // arguments.input_len)
        start = time.perf_counter()
        for first in range(0, batch, per_step):
            rows = slice(first, min(first + per_step, batch))
            unread.append((rows, 0, self._step(executor, rows, 0, self.prompts[rows], margins)))
            read(batch if overlap else 0)
        read(0)
        first_token = time.perf_counter()
        tokens: np.ndarray | torch.Tensor = self._sample.last(every)
        for index in range(1, arguments.output_len):
            if not overlap:
                tokens = out[:, index - 1 : index]
            unread.append((every, index, self._step(executor, every, index, tokens, margins)))
            read(1 if overlap else 0)
        read(0)
        end = time.perf_counter()
        return first_token - start, (end - first_token) / (arguments.output_len - 1), out

    def _step(
        self,
        executor: ModelExecutor,
        rows: slice,
        index: int,
        tokens: np.ndarray | torch.Tensor,
        margins: np.ndarray | None,
    ) -> Picked:
        """Submits the step that produces the tokens with this index."""
        position = self.arguments.input_len + index - 1 if index else 0
        step = self.builder.build(rows, position, tokens)
        logits = executor.execute(step.tokens, step.positions, step.metadata, step.logits_indices)
        if margins is not None:
            first, second = logits.float().topk(2, dim=-1).values.unbind(-1)
            margins[rows, index] = (first - second).cpu().numpy()
        return self._sample(logits, rows, index)

    def measure(
        self, executor: ModelExecutor, batch: int, reference: _Reference | None, repeats: int, *, overlap: bool
    ) -> tuple[dict[str, Any], _Reference]:
        """One row of the results, and the tokens."""
        margins = np.zeros((batch, self.arguments.output_len), dtype=np.float32)
        _, _, tokens = self.generate(
            executor, batch, overlap=overlap, margins=margins
        )  # warm-up; its tokens are compared
        runs = [self.generate(executor, batch, overlap=overlap) for _ in range(repeats)]
        row = {
            "batch": batch,
            "ttft_ms": _summary([ttft * 1e3 for ttft, _, _ in runs]),
            "tpot_ms": _summary([tpot * 1e3 for _, tpot, _ in runs]),
            "repeatable": all(np.array_equal(tokens, again) for _, _, again in runs),
        }
        row["sequences_equal_to_eager"], row["largest_margin_at_a_difference"] = _against(tokens, reference)
        return row, _Reference(tokens=tokens, margins=margins)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """Tokens of one execution, for comparison with others."""

    tokens: np.ndarray  # [B, output_len]
    margins: np.ndarray  # [B, output_len], first logit less second


def _against(tokens: np.ndarray, reference: _Reference | None) -> tuple[int | None, float | None]:
    """Number of sequences equal to the reference's, and the largest margin at a first difference (near 0: a tie)."""
    if reference is None:
        return None, None
    differs = tokens != reference.tokens
    rows = np.flatnonzero(differs.any(axis=1))
    margins = reference.margins[rows, differs[rows].argmax(axis=1)]
    return len(tokens) - len(rows), float(margins.max()) if len(rows) else None


def graph_memory(bench: Bench) -> dict[str, Any]:
    """Memory of 20 decode graphs in one pool, and of the largest of them alone."""
    sizes = sequence_buckets(256)
    held = {}
    for name, chosen in (("all", sizes), ("largest", sizes[-1:])):
        with bench.executor("graph", graph_buckets=",".join(map(str, chosen)), graph_token_budget=1) as executor:
            held[name] = executor.runners.memory_bytes
    return {"buckets": list(sizes), "all_bytes": held["all"], "largest_bytes": held["largest"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Measurements of one rank."""

    rows: list[dict[str, Any]]
    stats: dict[str, Any]  # by mode
    outputs: dict[tuple[str, int], _Reference]  # by mode and batch
    graph_memory: dict[str, Any] | None


def measure(context: ranks.RankContext | None, arguments: argparse.Namespace) -> _Measured:
    """All modes and batches, on one rank or without a group."""
    bench = Bench(arguments, context)
    size = bench.model.tp.size
    rows: list[dict[str, Any]] = []
    stats: dict[str, Any] = {}
    outputs: dict[tuple[str, int], _Reference] = {}
    for executor_mode in arguments.modes.split(","):
        repeats = arguments.eager_repeats or arguments.repeats if executor_mode == "eager" else arguments.repeats
        with bench.executor(executor_mode) as executor:
            for mode, batch in product(MODES[executor_mode], bench.batches):
                reference = outputs.get(("eager", batch))
                row, outputs[mode, batch] = bench.measure(
                    executor, batch, reference, repeats, overlap=mode == OVERLAPPED
                )
                rows.append({"tp": size, "mode": mode} | row)
                if bench.leads:
                    print(
                        f"tp {size} {mode} B={batch}: TTFT {row['ttft_ms']['median']:.2f} ms, "
                        f"TPOT {row['tpot_ms']['median']:.3f}, best {row['tpot_ms']['best']:.3f}",
                        flush=True,
                    )
            stats[executor_mode] = executor.stats()
    memory = graph_memory(bench) if arguments.tp == "1" else None
    return _Measured(rows=rows, stats=stats, outputs=outputs, graph_memory=memory)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole sweep; each size of `--tp` runs in its own processes."""
    options = {name: getattr(arguments, name) for name in ("shape", "input_len", "output_len", "dtype", "attention")}
    if arguments.tp == "1":
        one = measure(None, arguments)
        return options | {"rows": one.rows, "stats": one.stats, "graph_memory": one.graph_memory}
    rows: list[dict[str, Any]] = []
    groups = []
    single: dict[tuple[str, int], _Reference] = {}
    how = ranks.Options(
        device=arguments.device, backend=arguments.tp_backend, symmetric_memory=arguments.symmetric_memory
    )
    for size in map(int, arguments.tp.split(",")):
        outcome = ranks.launch(measure, arguments, size, how)
        first: _Measured = outcome.values[0]
        if size == 1:
            single = first.outputs
        for row in first.rows:
            key = row["mode"], row["batch"]
            alike = all(
                np.array_equal(other.outputs[key].tokens, first.outputs[key].tokens) for other in outcome.values
            )
            equal, margin = _against(first.outputs[key].tokens, single.get(key) if size > 1 else None)
            more = {"ranks_alike": alike, "sequences_equal_to_one_rank": equal, "largest_margin_at_a_parting": margin}
            rows.append(row | more)
        groups.append({"tp": size, "end_s": outcome.end_s, "stats": first.stats})
    return options | {"rows": rows, "groups": groups}


def parse(command: list[str] | None = None) -> argparse.Namespace:
    """The options, with the defaults of the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--dtype")
    parser.add_argument("--batches", help="numbers of prompts, with commas between them")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}; eager first, to compare with")
    parser.add_argument("--input-len", type=int)
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager-repeats", type=int, help="of the eager mode, which takes the longest")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--tp", default="1", help="numbers of ranks, with commas between them; 1 comes first")
    parser.add_argument("--tp-backend", default="", help="of torch.distributed, such as gloo")
    parser.add_argument("--no-symmetric-memory", dest="symmetric_memory", action="store_false")
    parser.add_argument("--cut-collectives", action="store_true", help="piecewise graphs leave collectives out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command)
    for name, value in DEFAULTS[torch.device(arguments.device).type].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.output_len < 2:
        parser.error(f"--output-len is {arguments.output_len}; TPOT needs at least 2")
    if not all(part.isdecimal() and int(part) for part in arguments.tp.split(",")):
        parser.error(f"--tp is {arguments.tp!r}; it must be numbers of ranks, such as 1,2")
    if unknown := set(arguments.modes.split(",")) - set(MODES):
        parser.error(f"--modes has {sorted(unknown)}; known are {list(MODES)}")
    return arguments


def main(command: list[str] | None = None) -> None:
    """Runs the sweep; writes a result file to --out."""
    arguments = parse(command)
    measured = run(arguments)
    if arguments.out is not None:
        result_files.write(arguments.out, benchmark="sweep", device=arguments.device, results=measured)


def _summary(samples: list[float]) -> dict[str, Any]:
    return {"median": median(samples), "best": min(samples), "samples": samples}


if __name__ == "__main__":
    main()
