"""One rank of the kernels over shared memory, interpreted: python shared_memory_rank.py RANK FILE_OF_EACH_RANK...

The files are what the ranks share, in the place of memory that devices read of each other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from xllm_models.kernels import shared_memory

# Elements of a call: one unit, part of a span, several spans of each kind, and back: the channels are used again.
SIZES = (8, 40, 1024, 4096, 132 * 1024, 8, 8, 300 * 1024 + 8, 4096, 4096)
GATHERED = (4, 40, 4096, 40 * 1024 + 4, 4096, 600 * 1024, 8, 8)


def value(rank: int, call: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(size, generator=generator)


def main(rank: int, files: list[Path]) -> None:
    num_bytes = shared_memory.shared_bytes(len(files))
    shared = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in files]
    channels = shared_memory.Channels(
        rank=rank,
        addresses=torch.tensor([memory.data_ptr() for memory in shared]),
        counts=shared_memory.new_counts("cpu"),
    )
    channels.counts.fill_(2**31 - 3)  # it wraps around soon
    words = shared[rank].view(torch.int32)
    for kind in range(len(channels.counts)):
        end = shared_memory._begin(len(files), kind + 1) // 4
        words[end - shared_memory.NUM_PROGRAMS * len(files) : end] = 2**31 - 3
    (files[rank].parent / f"ready{rank}").touch()
    while not all((path.parent / f"ready{other}").exists() for other, path in enumerate(files)):
        pass
    for call, size in enumerate(SIZES):
        x = value(rank, call, size)
        shared_memory.all_reduce_(x, channels)
        expected = torch.zeros(size)
        for other in range(len(files)):
            expected += value(other, call, size)
        assert torch.equal(x, expected), (call, size, (x - expected).abs().max())
    for call, size in enumerate(GATHERED):
        out = torch.empty(len(files) * size)
        shared_memory.all_gather_into(out, value(rank, call, size), channels)
        expected = torch.cat([value(other, call, size) for other in range(len(files))])
        assert torch.equal(out, expected), (call, size)


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
