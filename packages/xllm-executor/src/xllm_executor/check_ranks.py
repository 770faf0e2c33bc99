"""Runs a model on several ranks, each a process, for the `check` command.

Owns the processes and what they report: the traces of the modules, and the findings of the conformance suite, which all
ranks run in the same order.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from xllm_models import CausalLM
from xllm_models.compare import LOGITS, TOLERANCES, Trace, first_difference, trace_rank

from . import tensor_parallel
from .check_steps import Finding, graph_options, raised, under_graphs

NUM_TOKENS = 24  # of the prompt whose modules and logits are compared between ranks
RANK_TIMEOUT_S = 600.0

Load = Callable[[int, int, str], CausalLM]  # (rank, number of ranks, device)


def over_ranks(model: CausalLM, load: Load, *, num_ranks: int, device: str, attention: str) -> Iterator[Finding]:
    """Compares the modules of several ranks with those of one, then runs the conformance suite on all ranks at once.

    `load` must be picklable. A rank that fails ends all of them: the others would wait for it in a collective.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context: Any = multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _rank, args=(load, num_ranks, device, attention, store.port, folder), nprocs=num_ranks, join=False
        )
        try:
            yield from _findings(model, folder, num_ranks, context)
        finally:
            for process in context.processes:
                process.terminate()


def _findings(model: CausalLM, folder: Path, num_ranks: int, context: Any) -> Iterator[Finding]:
    """The findings of the ranks, as they come."""
    done = False
    num_seen = 0
    while not done:
        try:
            done = context.join(timeout=0.2)
        except (ProcessExitedException, ProcessRaisedException):
            done = True
        found = _read(folder / "0.jsonl")
        for check, finding in found[num_seen:]:
            if check == _TRACED:
                yield f"{num_ranks} ranks give the logits of one", _difference(model, folder, num_ranks)
            elif finding is None:
                yield f"{num_ranks} ranks, {check}", None
        num_seen = len(found)
    yield from _failures(folder, num_ranks, context)


_TRACED = "traced"


def _difference(model: CausalLM, folder: Path, num_ranks: int) -> str | None:
    """The fault in the ranks' logits, with the module in which it begins."""
    ranks: list[Trace] = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    one = trace_rank(model, _tokens(model))
    tolerance = TOLERANCES[model.dtype]
    want = one.entries[LOGITS]
    errors = [float((trace.entries[LOGITS] - want).abs().max() / want.abs().max()) for trace in ranks]
    found = first_difference(model, one, ranks, tolerance=tolerance)
    if all(error <= tolerance for error in errors) or (found is None and one.choices):
        return None
    worst = max(range(num_ranks), key=lambda rank: errors[rank])
    logits = f"relative error {errors[worst]:.2e} of rank {worst}'s logits is beyond {tolerance:g}"
    return f"{logits}: {found}" if found is not None else logits


def _failures(folder: Path, num_ranks: int, context: Any) -> Iterator[Finding]:
    """The findings of every rank. Ranks that fail in the same way are named together."""
    failed: dict[Finding, list[int]] = {}
    for rank in range(num_ranks):
        for check, finding in _read(folder / f"{rank}.jsonl"):
            if finding is not None:
                failed.setdefault((check, finding), []).append(rank)
    for (check, finding), ranks in failed.items():
        yield f"{num_ranks} ranks, {check}", f"rank {', '.join(map(str, ranks))}: {finding}"
    codes = {rank: process.exitcode for rank, process in enumerate(context.processes) if process.exitcode}
    if codes and not failed:
        yield f"{num_ranks} ranks", f"processes ended with exit codes {codes} (by rank)"


def _read(path: Path) -> list[Finding]:
    """The findings that a rank has written so far; the last line may be incomplete."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [(check, finding) for check, finding in map(json.loads, lines)]


def _rank(rank: int, load: Load, num_ranks: int, device: str, attention: str, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    device = device if device == "cpu" else f"{device}:{rank}"
    with (folder / f"{rank}.jsonl").open("w", encoding="utf-8") as file:

        def report(check: str, finding: str | None) -> None:
            file.write(json.dumps([check, finding]) + "\n")
            file.flush()
            if finding is not None:
                time.sleep(_GRACE_S)
                raise SystemExit(1)  # the other ranks end too

        tensor_parallel.join(
            rank=rank,
            size=num_ranks,
            host="127.0.0.1",
            port=port,
            prefix="check",
            backend="",
            device=device,
            timeout=RANK_TIMEOUT_S,
        )
        check = "the model is built and loaded"
        try:
            model = load(rank, num_ranks, device)
            check = "a prompt runs eagerly"
            torch.save(trace_rank(model, _tokens(model)), folder / f"{rank}.pt")
        except Exception as error:  # noqa: BLE001 - the model may raise anything
            report(check, raised(error))
        distributed.barrier()
        report(_TRACED, None)
        for graph in graph_options(model.device):
            for check, finding in under_graphs(model, attention, graph):
                report(check, finding)
        distributed.barrier()  # no rank ends while another still waits for it
        tensor_parallel.leave()
    # All findings are written. A thread of the process group that still runs as the interpreter ends aborts the
    # process, which would look like a fault of the model.
    os._exit(0)


_GRACE_S = 1.0  # in which other ranks report the same finding, before the first to end takes them with it


def _tokens(model: CausalLM) -> list[int]:
    """The same tokens always."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    return ids
