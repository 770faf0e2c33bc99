"""One rank of the one-shot all-reduce, in Triton's interpreter: python all_reduce_rank.py RANK FILE_OF_EACH_RANK...

The files are what the ranks share, in the place of memory that devices read of each other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from xllm_models.kernels import all_reduce

# Elements of a call: one unit, part of a block, several blocks of either size, and back: the channels are used again.
SIZES = (8, 40, 1024, 4096, 132 * 1024, 8, 8, 130 * 1024 + 8, 4096, 4096)


def value(rank: int, call: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(size, generator=generator)


def main(rank: int, files: list[Path]) -> None:
    num_bytes = all_reduce.shared_bytes(len(files))
    shared = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in files]
    channels = all_reduce.Channels(
        rank=rank,
        addresses=torch.tensor([memory.data_ptr() for memory in shared]),
        counts=torch.zeros((len(all_reduce.BLOCK_BYTES), all_reduce.NUM_PROGRAMS), dtype=torch.int32),
    )
    channels.counts.fill_(2**31 - 3)  # it wraps around soon
    words = shared[rank].view(torch.int32)
    for kind in range(len(all_reduce.BLOCK_BYTES)):
        end = all_reduce._begin(len(files), kind + 1) // 4
        words[end - all_reduce.NUM_PROGRAMS * len(files) : end] = 2**31 - 3
    (files[rank].parent / f"ready{rank}").touch()
    while not all((path.parent / f"ready{other}").exists() for other, path in enumerate(files)):
        pass
    for call, size in enumerate(SIZES):
        x = value(rank, call, size)
        all_reduce.one_shot(x, channels)
        expected = torch.zeros(size)
        for other in range(len(files)):
            expected += value(other, call, size)
        assert torch.equal(x, expected), (call, size, (x - expected).abs().max())


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
