"""One rank of the symmetric-memory kernels, interpreted: python shared_memory_rank.py RANK FILE_OF_EACH_RANK...

Files that all ranks map stand in for symmetric memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from xllm_models import ops
from xllm_models.kernels.lamport_all_reduce import all_reduce_, all_reduce_add_rms_norm
from xllm_models.kernels.symmetric_all_gather import all_gather_into
from xllm_models.kernels.symmetric_buffers import (
    NUM_PROGRAMS,
    SUM_SLOTS,
    SymmetricBuffers,
    buffer_bytes,
    gather_flags_offset,
    initialize,
    new_counts,
)

# Elements of a call: one vector, part of a chunk, several chunks of each size class, then small ones in reused slots.
SIZES = (8, 40, 1024, 4096, 132 * 1024, 8, 8, 300 * 1024 + 8, 4096, 4096)
GATHERED = (4, 40, 4096, 40 * 1024 + 4, 4096, 600 * 1024, 8, 8)
GATHERED_COLUMNS = ((1, 4), (3, 20), (2, 4096), (5, 40 * 1024 + 4), (3, 8))
NORMED = (
    (1, 64),
    (3, 40),
    (128, 8),
    (130, 40),
    (1, 300),
    (257, 4),
    (2, 64),
)  # one row per program, several, and a partial last program
TOO_LARGE = (600, 4096)


def value(rank: int, call: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(size, generator=generator)


def main(rank: int, files: list[Path]) -> None:
    num_bytes = buffer_bytes(len(files))
    shared = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in files]
    buffers = SymmetricBuffers(
        rank=rank, addresses=torch.tensor([memory.data_ptr() for memory in shared]), counts=new_counts("cpu")
    )
    initialize(shared[rank], len(files))
    buffers.counts[:-1] = SUM_SLOTS - 1
    buffers.counts[-1] = 2**31 - 3  # wraps around soon
    begin = gather_flags_offset() // 4
    shared[rank].view(torch.int32)[begin : begin + NUM_PROGRAMS * len(files)] = 2**31 - 3
    (files[rank].parent / f"ready{rank}").touch()
    while not all((path.parent / f"ready{other}").exists() for other, path in enumerate(files)):
        pass
    for call, size in enumerate(SIZES):
        x = value(rank, call, size)
        all_reduce_(x, buffers)
        expected = torch.zeros(size)
        for other in range(len(files)):
            expected += value(other, call, size)
        assert torch.equal(x, expected), (call, size, (x - expected).abs().max())
    # A NaN with the bits of the sentinel must arrive as a NaN.
    for bits in (-1, -2):
        x = torch.full((8,), bits, dtype=torch.int32).view(torch.float32)
        all_reduce_(x, buffers)
        assert bool(x.isnan().all())
    for call, size in enumerate(SIZES[:5]):  # integers: the interpreter's rounding to bf16 differs from torch's
        x = value(rank, call, size).round().bfloat16()
        all_reduce_(x, buffers)
        expected = torch.zeros(size)
        for other in range(len(files)):
            expected += value(other, call, size).round()
        assert torch.equal(x.float(), expected), (call, size)
    for call, shape in enumerate(NORMED):
        size = shape[0] * shape[1]
        terms = [value(other, call, size).view(shape) for other in range(len(files))]
        residual, weight = value(90, call, size).view(shape), value(91, call, shape[1])
        given = terms[rank].clone()
        found = all_reduce_add_rms_norm(given, residual, weight, 1e-6, call % 2 == 1, None, buffers)
        assert found is not None
        assert torch.equal(given, terms[rank])
        summed = torch.zeros(shape)
        for term in terms:
            summed += term
        expected = ops.fused_add_rms_norm(summed, residual, weight, 1e-6, call % 2 == 1)
        assert torch.equal(found[1], expected[1]), (call, shape)
        assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-6), (call, shape)
    large = torch.zeros(TOO_LARGE)
    assert all_reduce_add_rms_norm(large, large, large[0], 1e-6, False, None, buffers) is None
    for call, size in enumerate(GATHERED):
        out = torch.empty(len(files) * size)
        all_gather_into(out, value(rank, call, size), 0, buffers)
        expected = torch.cat([value(other, call, size) for other in range(len(files))])
        assert torch.equal(out, expected), (call, size)
    odd_rows = [torch.arange(48).add(100 * other).bfloat16().view(16, 3) for other in range(len(files))]
    out = torch.empty(len(files) * 16, 3, dtype=torch.bfloat16)
    all_gather_into(out, odd_rows[rank], 0, buffers)
    assert torch.equal(out, torch.cat(odd_rows))
    for call, shape in enumerate(GATHERED_COLUMNS):
        parts = [value(other, call, shape[0] * shape[1]).view(shape) for other in range(len(files))]
        out = torch.empty(shape[0], len(files) * shape[1])
        all_gather_into(out, parts[rank], 1, buffers)
        assert torch.equal(out, torch.cat(parts, dim=1)), (call, shape)


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
