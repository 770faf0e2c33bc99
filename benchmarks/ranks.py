"""Launches one function on several tensor-parallel ranks of this host, one process each, and ends them together.

Owns the processes, their rendezvous store and their timeouts. The caller supplies a picklable function.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from torch import distributed

from xllm_executor import tensor_parallel
from xllm_models import TensorParallel

GRACE_S = 3.0  # after one rank is gone, the time for the others to report their own error
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's group and device."""

    tp: TensorParallel
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How ranks are connected, and their timeouts.

    Attributes:
        device: a type such as "cuda", where rank r takes index r; with an index, all ranks share that device.
        backend: of torch.distributed; empty selects the device's default.
        symmetric_memory: see `tensor_parallel.join`.
        timeout_s: from the start to the last result.
        end_s: from the last result to the exit of the last process, which destroys graphs and groups first.
    """

    device: str
    backend: str = ""
    symmetric_memory: bool = True
    timeout_s: float = 1800.0
    end_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of the ranks."""

    values: tuple[Any, ...]  # by rank
    end_s: float  # measured; see `Options`


def launch(work: Callable[[RankContext, Any], Any], argument: Any, size: int, options: Options) -> Outcome:
    """Runs `work(context, argument)` on every rank, with their process group registered.

    Raises:
        RuntimeError: a rank failed or timed out; the message names it. No process is left.
    """
    spawn = get_context("spawn")
    store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = spawn.Pipe(duplex=False)
        context = RankContext(tp=TensorParallel(rank=rank, size=size), device=_device(options.device, rank, size))
        process = spawn.Process(target=_rank, args=(work, argument, context, options, store.port, sender))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return _collect(receivers, processes, options)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    work: Callable[[RankContext, Any], Any],
    argument: Any,
    context: RankContext,
    options: Options,
    port: int,
    sender: Connection,
) -> None:
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    if context.tp.size > 1:
        tensor_parallel.join(
            rank=context.tp.rank,
            size=context.tp.size,
            host=HOST,
            port=port,
            prefix="ranks",
            backend=options.backend,
            device=context.device,
            timeout=120.0,
            symmetric_memory=options.symmetric_memory,
        )
    sender.send(work(context, argument))
    tensor_parallel.leave()


def _end_with_the_launcher() -> None:
    """Exits with the launcher. A killed launcher cannot end the ranks, and a rank may poll in a kernel without end."""
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _collect(receivers: Sequence[Connection], processes: Sequence[Any], options: Options) -> Outcome:
    values: dict[int, Any] = {}
    limit = time.monotonic() + options.timeout_s
    while len(values) < len(processes):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in values]
        ready = wait([*waiting, *(process.sentinel for process in processes)], max(0.0, limit - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(processes)) if rank not in values]
            raise RuntimeError(f"ranks {missing} did not end within {options.timeout_s:g} s")
        for rank, receiver in enumerate(receivers):
            if receiver in ready and rank not in values and receiver.poll():
                try:
                    values[rank] = receiver.recv()
                except EOFError:
                    processes[rank].join()
        _check(processes, values)
    start = time.monotonic()
    for rank, process in enumerate(processes):
        process.join(max(0.0, start + options.end_s - time.monotonic()))
        if process.is_alive():
            raise RuntimeError(f"rank {rank} returned its result, but did not exit within {options.end_s:g} s")
    end_s = time.monotonic() - start
    _check(processes, values)
    return Outcome(values=tuple(values[rank] for rank in range(len(processes))), end_s=end_s)


def _check(processes: Sequence[Any], values: dict[int, Any]) -> None:
    """Raises for the rank that is gone, after the others had time to exit."""
    if all(
        process.exitcode is None or (process.exitcode == 0 and rank in values) for rank, process in enumerate(processes)
    ):
        return
    limit = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
    codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode is not None}
    # A rank that a signal killed comes first: the others fail because of it.
    rank = min(codes, key=lambda rank: (codes[rank] >= 0, codes[rank] == 0 and rank in values, rank))
    code = codes[rank]
    how = f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
    raise RuntimeError(f"rank {rank} is gone: {how}")


def _device(device: str, rank: int, size: int) -> str:
    return device if ":" in device or device == "cpu" or size == 1 else f"{device}:{rank}"
