"""Two ranks of the symmetric-memory kernels on one CUDA device: each on its own stream, in its own graph.

A separate script, since ranks that miss each other hang: `test_kernels` runs it with a timeout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from xllm_models.kernels import norm
from xllm_models.kernels.lamport_all_reduce import all_reduce_, all_reduce_add_rms_norm
from xllm_models.kernels.symmetric_all_gather import all_gather_into
from xllm_models.kernels.symmetric_buffers import SymmetricBuffers, buffer_bytes, initialize, new_counts

NUM_RANKS = 2
SUMS = ((1, 1024), (8, 1024), (112, 1024), (3, 40), (512, 1024), (2048, 1024), (1, 8))  # of every size class
NORMED = ((1, 1024), (112, 1024), (300, 1024), (3, 40))
GATHERS = ((1, 75968), (8, 75968), (112, 75968), (1, 8))
SHAPES = (*SUMS, *NORMED, *GATHERS)
EPS = 1e-6
NUM_REPLAYS = 20


def make_buffers() -> tuple[torch.Tensor, list[SymmetricBuffers]]:
    memory = torch.empty((NUM_RANKS, buffer_bytes(NUM_RANKS)), dtype=torch.uint8, device="cuda")
    for part in memory:
        initialize(part, NUM_RANKS)
    addresses = torch.tensor([part.data_ptr() for part in memory], device="cuda")
    return memory, [
        SymmetricBuffers(rank=rank, addresses=addresses, counts=new_counts("cuda")) for rank in range(NUM_RANKS)
    ]


def other_operands(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual and weight of a norm, the same on both ranks."""
    generator = torch.Generator().manual_seed(shape[0])
    return (
        torch.randn(shape, generator=generator).bfloat16().cuda(),
        torch.randn(shape[1], generator=generator).bfloat16().cuda(),
    )


OPERANDS = [other_operands(shape) for shape in NORMED]


def calls(
    inputs: list[torch.Tensor], buffers: SymmetricBuffers, before: Callable[[], object] = lambda: None
) -> list[torch.Tensor]:
    """Sums in place; returns norms, then what was gathered. `before` each of them."""
    results = []
    at = iter(inputs)
    for _ in SUMS:
        before()
        all_reduce_(next(at), buffers)
    for residual, weight in OPERANDS:
        before()
        done = all_reduce_add_rms_norm(next(at), residual, weight, EPS, False, weight, buffers)
        assert done is not None
        results.extend(done)
    for x in at:
        before()
        out = x.new_empty((x.shape[0], NUM_RANKS * x.shape[1]))
        all_gather_into(out, x, 1, buffers)
        results.append(out)
    return results


def load_kernels(memory: torch.Tensor, buffers: list[SymmetricBuffers]) -> None:
    """Runs every variant once, rank by rank: lazy loading may wait for running kernels, which would deadlock."""

    def other_came() -> None:
        """Simulates a peer that has sent long ago: flags far in the future, no sentinels."""
        memory.view(torch.int32).fill_(1 << 30)

    for rank in range(NUM_RANKS):
        inputs = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in SHAPES]
        calls(inputs, buffers[rank], other_came)
        torch.cuda.synchronize()
        buffers[rank].counts.zero_()
    for part in memory:
        initialize(part, NUM_RANKS)


def expected_of(terms: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sums, and what `calls` returns."""
    sums = [(first.float() + second.float()).bfloat16() for first, second in zip(*terms, strict=True)]
    results = []
    for x, (residual, weight) in zip(sums[len(SUMS) : len(SUMS) + len(NORMED)], OPERANDS, strict=True):
        results.extend(norm.fused_add_rms_norm(x, residual, weight, EPS))
    first_gather = len(SUMS) + len(NORMED)
    results += [torch.cat(parts, dim=1) for parts in zip(*(mine[first_gather:] for mine in terms), strict=True)]
    return sums[: len(SUMS)], results


def main() -> None:
    memory, buffers = make_buffers()
    load_kernels(memory, buffers)
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(shape, generator=generator).bfloat16().cuda() for shape in SHAPES] for _ in range(NUM_RANKS)]
    sums, expected = expected_of(values)
    inputs = [[x.clone() for x in mine] for mine in values]
    results, graphs, streams = [], [], [torch.cuda.Stream() for _ in range(NUM_RANKS)]
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for x, value in zip(inputs[rank], values[rank], strict=True):
                x.copy_(value)
            results.append(calls(inputs[rank], buffers[rank]))
        graphs.append(graph)
    for _ in range(NUM_REPLAYS):
        for own in results:
            for out in own:
                out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for rank in range(NUM_RANKS):
            for x, wanted in zip(inputs[rank], sums, strict=False):
                assert torch.equal(x, wanted), x.shape
            for out, wanted in zip(results[rank], expected, strict=True):
                assert torch.equal(out, wanted), out.shape


if __name__ == "__main__":
    main()
