"""Four ranks over gloo that live as long as the tests, and run models at tensor-parallel sizes up to 4.

`RankPool` starts them; run as a script, this file is one rank: RANK RENDEZVOUS, then one job a line on stdin.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

NUM_RANKS = 4


class RankPool:
    """Runs a checkpoint over all of `paged_session.STEPS` on the first ranks of the pool."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_jobs = 0
        self._errors = [(directory / f"rank{rank}.log").open("w+") for rank in range(NUM_RANKS)]
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(directory / "rendezvous")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[rank],
                text=True,
            )
            for rank in range(NUM_RANKS)
        ]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, log in zip(self._ranks, self._errors, strict=True):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
            log.close()

    def run(
        self,
        directory: Path,
        size: int,
        *,
        loader: str = "xllm_models:load_model",
        call: str = "rank_pool:all_steps",
        **options: Any,
    ) -> list[Any]:
        """What `call`, MODULE:FUNCTION, returns for the model of each rank; `options` go to `loader`, another one.

        By default that is (sequence, first position, logits [n, vocab]) of every entry of every step. A rank that fails
        is an AssertionError with its traceback.
        """
        import torch

        self._num_jobs += 1
        outputs = [self._directory / f"job{self._num_jobs}-rank{rank}.pt" for rank in range(size)]
        for process, output in zip(self._ranks[:size], outputs, strict=True):
            job = {"directory": str(directory), "size": size, "output": str(output), "options": options}
            job |= {"loader": loader, "call": call}
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        # A rank that fails leaves the others waiting in a collective, so all are read before any is judged; gloo's
        # own timeout ends the wait.
        answers = [process.stdout.readline() for process in self._ranks[:size] if process.stdout is not None]
        failed = [json.loads(answer or '"rank died"') for answer in answers if answer != '""\n']
        assert not failed, "\n".join(failed)
        results = [torch.load(output) for output in outputs]
        for output in outputs:
            output.unlink()
        return results


def serve(rank: int, rendezvous: str) -> None:
    """Answer each job with a line: an empty JSON string, or the traceback."""
    from datetime import timedelta

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS, timeout=timeout
    )
    groups = {size: distributed.new_group(list(range(size)), timeout=timeout) for size in (1, 2, 4)}
    for line in sys.stdin:
        try:
            _run_job(rank, groups, **json.loads(line))
            answer = ""
        except Exception:  # noqa: BLE001 - the pool raises the traceback that it gets
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)
    distributed.destroy_process_group()


def _named(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def all_steps(model: Any) -> list[Any]:
    """The logits of every step of the paged session."""
    from paged_session import PagedSession, run_steps

    results = list(run_steps(model))
    # A step without tokens runs the collectives too.
    (empty,) = PagedSession(model, num_sequences=1).step([(0, [])])
    assert empty.shape == (0, model.config.vocab_size)
    return results


def _run_job(
    rank: int, groups: Any, directory: str, size: int, output: str, options: Any, loader: str, call: str
) -> None:
    import torch

    from xllm_models.ops import register_group, unregister_group

    model = _named(loader)(directory, tp_rank=rank, tp_size=size, **options)
    register_group("tp", groups[size])
    try:
        results = _named(call)(model)
    finally:
        unregister_group("tp")
    torch.save(results, output)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
