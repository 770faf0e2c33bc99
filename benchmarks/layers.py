"""Latent attention (MLA) and Gated DeltaNet per layer on a CUDA device, beside FlashInfer, fla and the limits.

    python benchmarks/layers.py [--out benchmarks/results/layers-h200.json]

Decode is one captured graph of several layers with distinct caches or states. Times are of one layer. `least` is the
larger of two times: to read and write the bytes at the measured read bandwidth, and to compute the products at the
dense rate of a large bf16 product, measured too. Shapes are DeepSeek-V3's (128 or 16 query heads over rows of 576,
values of 512) and Qwen3-Next's (16 key and 32 value heads of 128), bfloat16, pages of 64.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import results as result_files
import torch
from timing import device_us, read_bandwidth

from xllm_attention import AttentionBackend, AttentionSpec, BackendLimits, GatedDeltaNetSpec, StateStep, create_backend
from xllm_metadata import LayerCache, allocate_caches, build_attention_metadata

DTYPE = torch.bfloat16
PAGE_SIZE, NUM_LAYERS = 64, 4
KEY_DIM, VALUE_DIM = 576, 512
HEADS, BATCHES, CONTEXTS = (128, 16), (1, 8, 32, 100), (1024, 8192)
PROMPTS = {  # name -> (tokens in the step, KV length), each times the number of sequences
    "1 prompt of 1024": ([1024], [1024]),
    "8 prompts of 1024": ([1024] * 8, [1024] * 8),
    "8 chunks of 512 after 1536": ([512] * 8, [2048] * 8),
    "1 prompt of 8192": ([8192], [8192]),
}
STATE = GatedDeltaNetSpec(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)


def dense_rate() -> float:
    """TFLOP/s of a product of 8192 x 8192 x 8192 in bf16."""
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=DTYPE) for _ in range(2))
    return float(2 * 8192**3 / device_us(lambda: a @ b, 20) / 1e6)


def captured_us(launch: Callable[[], object], repeats: int = 10) -> float:
    """Median device time of `launch` in a captured graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    us = device_us(graph.replay, repeats)
    del graph
    return us


def make_step(q_lens: Sequence[int], kv_lens: Sequence[int]) -> Any:
    """Metadata over pages in random order."""
    pages = [-(-length // PAGE_SIZE) for length in kv_lens]
    order = list(range(sum(pages)))
    random.Random(0).shuffle(order)
    return build_attention_metadata(
        q_lens, kv_lens, [[order.pop() for _ in range(count)] for count in pages], PAGE_SIZE, "cuda"
    )


class Latent:
    """Layers of latent attention over caches of their own, for one step."""

    def __init__(self, num_heads: int, q_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        self.num_heads, self.q_lens, self.kv_lens = num_heads, list(q_lens), list(kv_lens)
        self.metadata = make_step(q_lens, kv_lens)
        num_pages = int(self.metadata.paged_kv_indptr_host[-1])
        shape = (num_pages, PAGE_SIZE, 1, KEY_DIM)
        self.caches = [torch.empty(shape, dtype=DTYPE, device="cuda").normal_() for _ in range(NUM_LAYERS)]
        num_tokens = sum(q_lens)
        self.q = torch.randn((NUM_LAYERS, num_tokens, num_heads, KEY_DIM), device="cuda", dtype=DTYPE)
        self.k = torch.randn((NUM_LAYERS, num_tokens, 1, KEY_DIM), device="cuda", dtype=DTYPE)
        self.out = torch.empty((num_tokens, num_heads, VALUE_DIM), device="cuda", dtype=DTYPE)
        self.scale = 192**-0.5

    @property
    def decodes(self) -> bool:
        """Whether the step has one token per sequence."""
        return set(self.q_lens) == {1}

    @property
    def num_bytes(self) -> int:
        """Of the cached rows that a layer reads, and of its queries and output."""
        return 2 * (sum(self.kv_lens) * KEY_DIM + sum(self.q_lens) * self.num_heads * (KEY_DIM + VALUE_DIM))

    @property
    def num_operations(self) -> int:
        """Of a layer's two products, in the absorbed form."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return 2 * pairs * self.num_heads * (KEY_DIM + VALUE_DIM)

    @contextmanager
    def backend(self, name: str) -> Iterator[AttentionBackend]:
        """A planned backend."""
        spec = AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=1, head_dim=KEY_DIM, v_head_dim=VALUE_DIM, latent=True,
            scale=self.scale,
        )  # fmt: skip
        limits = BackendLimits(
            device=torch.device("cuda"), dtype=DTYPE, max_num_seqs=len(self.q_lens), max_num_tokens=sum(self.q_lens),
            max_model_len=max(self.kv_lens),
        )  # fmt: skip
        backend = create_backend(name, [spec] * NUM_LAYERS, limits)
        backend.bind_kv_caches([LayerCache(k=cache) for cache in self.caches])
        backend.plan(self.metadata, graph=self.decodes)
        yield backend

    def triton_us(self) -> float:
        """The triton backend, append included."""
        with self.backend("triton") as backend:

            def layers() -> None:
                for layer in range(NUM_LAYERS):
                    backend.run(self.q[layer], self.k[layer], self.k[layer], self.out, layer)

            return captured_us(layers) / NUM_LAYERS

    def flashinfer_us(self, backend: str) -> float | None:
        """FlashInfer's kernel without the append, which it leaves to the caller; None where it is not installed."""
        try:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper
        except ImportError:
            return None
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        m = self.metadata
        qo_indptr = torch.tensor([0, *self.q_lens], device="cuda").cumsum(0).int()
        kv_lens = torch.tensor(self.kv_lens, device="cuda", dtype=torch.int32)
        wrapper.plan(
            qo_indptr, m.paged_kv_indptr, m.paged_kv_indices, kv_lens, self.num_heads, VALUE_DIM,
            KEY_DIM - VALUE_DIM, PAGE_SIZE, True, self.scale, DTYPE, DTYPE,
        )  # fmt: skip

        def layers() -> None:
            for layer in range(NUM_LAYERS):
                q, cache = self.q[layer], self.caches[layer][:, :, 0]
                wrapper.run(
                    q[..., :VALUE_DIM], q[..., VALUE_DIM:], cache[..., :VALUE_DIM], cache[..., VALUE_DIM:], out=self.out
                )

        return captured_us(layers) / NUM_LAYERS


def latent_row(num_heads: int, q_lens: Sequence[int], kv_lens: Sequence[int], **names: object) -> dict[str, Any]:
    """Times of one step, and the bytes and operations of a layer."""
    latent = Latent(num_heads, q_lens, kv_lens)
    times = {
        "triton": latent.triton_us(), "flashinfer fa2": latent.flashinfer_us("fa2"),
        "flashinfer fa3": latent.flashinfer_us("fa3"),
    }  # fmt: skip
    row = {**names, "num_heads": num_heads, "bytes": latent.num_bytes, "operations": latent.num_operations, "us": times}
    print(row, flush=True)
    return row


def state_inputs(num_rows: int) -> tuple[torch.Tensor, ...]:
    """Random inputs of one layer."""
    heads, channels = STATE.num_v_heads, STATE.num_channels
    shapes = ((num_rows, channels), (num_rows, heads), (num_rows, heads), (channels, STATE.conv_kernel_size))
    return tuple(torch.randn(shape, device="cuda", dtype=DTYPE) for shape in (*shapes, (heads,), (heads,)))


def state_caches(num_slots: int) -> list[LayerCache]:
    """Zeroed states of all layers."""
    specs = [STATE.cache_specs(DTYPE)] * NUM_LAYERS
    return allocate_caches(specs, num_pages=1, page_size=1, num_slots=num_slots, device="cuda")


def state_decode_row(num_seqs: int) -> dict[str, Any]:
    """Times of a decode step: the kernels, and the formula in PyTorch ops."""
    caches, inputs = state_caches(num_seqs), state_inputs(num_seqs)
    out = torch.empty((num_seqs, STATE.num_v_heads, STATE.head_v_dim), device="cuda", dtype=DTYPE)
    slots = torch.randperm(num_seqs, device="cuda", dtype=torch.int32)
    step = StateStep(True, slots, slots, torch.ones(num_seqs, dtype=torch.bool, device="cuda"), ())
    times = {}
    for name in ("triton", "torch"):

        def layers(name: str = name) -> None:
            for cache in caches:
                run = STATE.run if name == "triton" else STATE.run_formula
                run(step, cache, inputs, out)

        times[name] = captured_us(layers) / NUM_LAYERS
    state = STATE.num_v_heads * STATE.head_k_dim * STATE.head_v_dim * 4
    window = STATE.num_channels * (STATE.conv_kernel_size - 1) * 2
    rows = (STATE.num_channels + STATE.num_v_heads * (STATE.head_v_dim + 2)) * 2
    row = {"num_seqs": num_seqs, "bytes": num_seqs * (2 * (state + window) + rows), "us": times}
    print(row, flush=True)
    return row


def state_prompt_row(name: str) -> dict[str, Any]:
    """Times of one step with prompts or chunks, launched eagerly: fla's kernels, and the formula in PyTorch ops."""
    q_lens, kv_lens = PROMPTS[name]
    caches, inputs = state_caches(len(q_lens)), state_inputs(sum(q_lens))
    out = torch.empty((sum(q_lens), STATE.num_v_heads, STATE.head_v_dim), device="cuda", dtype=DTYPE)
    slots = torch.arange(len(q_lens), device="cuda", dtype=torch.int32)
    initial = torch.tensor([kv > q for q, kv in zip(q_lens, kv_lens, strict=True)], device="cuda")
    bounds = (0, *torch.tensor(q_lens).cumsum(0).tolist())
    times: dict[str, float] = {}
    for label, run in (("fla", STATE.run), ("torch", STATE.run_formula)):

        def layers(run: Any = run) -> None:
            step = StateStep(False, slots, slots, initial, bounds)
            for cache in caches:
                run(step, cache, inputs, out)

        times[label] = device_us(layers, 5) / NUM_LAYERS
    rows = (STATE.num_channels + STATE.num_v_heads * (STATE.head_v_dim + 2)) * 2
    row = {"name": name, "bytes": sum(q_lens) * rows, "us": times}
    print(row, flush=True)
    return row


def main() -> None:
    """Runs everything and writes one result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=result_files.RESULTS / "layers-h200.json")
    arguments = parser.parse_args()
    results = {
        "read_tb_s": read_bandwidth(),
        "dense_tflop_s": dense_rate(),
        "latent_decode": [
            latent_row(heads, [1] * num_seqs, [context] * num_seqs, num_seqs=num_seqs, context=context)
            for heads in HEADS
            for context in CONTEXTS
            for num_seqs in BATCHES
        ],
        "latent_prompts": [latent_row(heads, *PROMPTS[name], name=name) for heads in HEADS for name in PROMPTS],
        "state_decode": [state_decode_row(num_seqs) for num_seqs in BATCHES],
        "state_prompts": [state_prompt_row(name) for name in PROMPTS],
    }
    result_files.write(arguments.out, benchmark="layers", device="cuda", results=results)


if __name__ == "__main__":
    main()
