"""Loads a checkpoint and reports its own memory: DIRECTORY RANK SIZE DTYPE -> one JSON line, in bytes.

A process of its own, so that nothing else counts.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

from xllm_models import load_model


def anonymous_memory() -> int:
    """RssAnon: memory that is no file's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def main() -> None:
    directory, rank, size, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    torch.ones(1000).sum()
    before = peak = anonymous_memory()
    loading = True

    def sample() -> None:
        nonlocal peak
        while loading:
            peak = max(peak, anonymous_memory())
            time.sleep(0.0005)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    model = load_model(directory, tp_rank=rank, tp_size=size, dtype=dtype)
    loading = False
    sampler.join()
    peak = max(peak, anonymous_memory())
    shard = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"peak": peak - before, "shard": shard}))


if __name__ == "__main__":
    main()
