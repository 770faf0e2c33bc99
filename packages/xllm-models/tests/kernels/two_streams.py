"""Two ranks of the kernels over shared memory on one CUDA device: each on a stream, in a graph of its own.

A script of its own, since ranks that do not meet wait for ever: `test_kernels` gives it a limit.
"""

from __future__ import annotations

import torch

from xllm_models.kernels import shared_memory

NUM_RANKS = 2
SUMS = ((1, 1024), (8, 1024), (112, 1024), (3, 40), (512, 1024), (2048, 1024), (1, 8))  # of every kind of channel
GATHERS = ((1, 75968), (8, 75968), (112, 75968), (1, 8))
NUM_REPLAYS = 20


def make_channels() -> tuple[torch.Tensor, list[shared_memory.Channels]]:
    memory = torch.zeros((NUM_RANKS, -(-shared_memory.shared_bytes(NUM_RANKS) // 128) * 128), dtype=torch.uint8).cuda()
    addresses = torch.tensor([part.data_ptr() for part in memory], device="cuda")
    return memory, [
        shared_memory.Channels(rank=rank, addresses=addresses, counts=shared_memory.new_counts("cuda"))
        for rank in range(NUM_RANKS)
    ]


def calls(inputs: list[torch.Tensor], outputs: list[torch.Tensor], channels: shared_memory.Channels) -> None:
    for x in inputs[: len(SUMS)]:
        shared_memory.all_reduce_(x, channels)
    for x, out in zip(inputs[len(SUMS) :], outputs, strict=True):
        shared_memory.all_gather_into(out, x, channels)


def load_kernels(memory: torch.Tensor, channels: list[shared_memory.Channels]) -> None:
    """Every variant once, one after another: loading code may wait for kernels that run, which would wait for it."""
    for rank in range(NUM_RANKS):
        memory.view(torch.int32).fill_(1 << 30)  # as if the other had come long ago
        inputs = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in (*SUMS, *GATHERS)]
        outputs = [x.new_empty((NUM_RANKS, *x.shape)) for x in inputs[len(SUMS) :]]
        calls(inputs, outputs, channels[rank])
        torch.cuda.synchronize()
        channels[rank].counts.zero_()
    memory.zero_()


def main() -> None:
    memory, channels = make_channels()
    load_kernels(memory, channels)
    generator = torch.Generator().manual_seed(0)
    values = [
        [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in (*SUMS, *GATHERS)]
        for _ in range(NUM_RANKS)
    ]
    inputs = [[x.clone() for x in mine] for mine in values]
    outputs = [[x.new_empty((NUM_RANKS, *x.shape)) for x in mine[len(SUMS) :]] for mine in values]
    graphs, streams = [], [torch.cuda.Stream() for _ in range(NUM_RANKS)]
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for x, value in zip(inputs[rank], values[rank], strict=True):
                x.copy_(value)
            calls(inputs[rank], outputs[rank], channels[rank])
        graphs.append(graph)
    for _ in range(NUM_REPLAYS):
        for own in outputs:
            for out in own:
                out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for index in range(len(SUMS)):
            expected = (values[0][index].float() + values[1][index].float()).bfloat16()
            assert all(torch.equal(inputs[rank][index], expected) for rank in range(NUM_RANKS)), SUMS[index]
        for index, shape in enumerate(GATHERS):
            expected = torch.stack([values[rank][len(SUMS) + index] for rank in range(NUM_RANKS)])
            assert all(torch.equal(outputs[rank][index], expected) for rank in range(NUM_RANKS)), shape


if __name__ == "__main__":
    main()
