"""Append and attention per layer on a CUDA device: the triton and flashinfer backends, and `auto`.

    python benchmarks/attention.py [--out benchmarks/results/attention-h200.json] [--kv-cache-dtype fp8_e4m3]
    python benchmarks/attention_table.py

Decode is one captured graph of 28 layers with distinct caches (as many as fit into memory; it never matters, since one
layer's keys then exceed the cache of the device by far), so that launches cost what they cost in a model. Bytes are
those of the keys and values that must be read. Shapes are Qwen3-0.6B's: 16 heads over 8 of 128, bfloat16, pages of 16.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import results as result_files
import torch
from timing import device_us, host_us, read_bandwidth

from xllm_attention import AttentionBackend, AttentionSpec, BackendLimits, create_backend
from xllm_attention.backends.flashinfer_backend import plans
from xllm_attention.conformance import reference_attention
from xllm_metadata import LayerCache, build_attention_metadata

SPEC = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
DTYPE = torch.bfloat16
PAGE_SIZE, NUM_LAYERS = 16, 28
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 100), (128, 1024, 8192, 32768)
CACHE_BYTES = 100 << 30
CUDA_CORES, TENSOR_CORES = "flashinfer, CUDA cores", "flashinfer, tensor cores"
CANDIDATES = ("triton", CUDA_CORES, TENSOR_CORES, "flashinfer", "auto")
PROMPTS = {  # name -> (tokens in the step, KV length), each times the number of sequences
    "8 prompts of 1024": ([1024] * 8, [1024] * 8),
    "8 chunks of 512 after 1536": ([512] * 8, [2048] * 8),
    "1 prompt of 8192": ([8192], [8192]),
    "4 tokens for each of 32 at 1024": ([4] * 32, [1024] * 32),
}


def token_bytes() -> int:
    """Keys and values of a token in one layer."""
    return sum(one.bytes_per_entry for one in SPEC.cache_specs(DTYPE))


def make_caches(num_tokens: int) -> list[LayerCache]:
    """Random caches of `num_tokens` tokens each, for as many layers as fit."""
    num_caches = max(1, min(NUM_LAYERS, CACHE_BYTES // (num_tokens * token_bytes())))
    shape = (num_tokens // PAGE_SIZE, PAGE_SIZE, SPEC.num_kv_heads, SPEC.head_dim)

    def fill() -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPE, device="cuda").normal_().to(SPEC.cache_dtype or DTYPE)

    return [LayerCache(k=fill(), v=fill()) for _ in range(num_caches)]


def make_step(q_lens: Sequence[int], kv_lens: Sequence[int]) -> Any:
    """Metadata over pages in random order."""
    pages = [-(-length // PAGE_SIZE) for length in kv_lens]
    order = list(range(sum(pages)))
    random.Random(0).shuffle(order)
    tables = [[order.pop() for _ in range(count)] for count in pages]
    return build_attention_metadata(q_lens, kv_lens, tables, PAGE_SIZE, "cuda")


@contextmanager
def candidate(
    name: str, caches: Sequence[LayerCache], *, num_seqs: int, num_tokens: int, max_len: int
) -> Iterator[AttentionBackend]:
    """A backend with NUM_LAYERS layers over the caches; two names force FlashInfer's choice of decode kernel."""
    forced = {CUDA_CORES: False, TENSOR_CORES: True}.get(name)
    original = plans.use_tensor_cores
    if forced is not None:
        plans.use_tensor_cores = lambda group_size, num_seqs: forced  # type: ignore[assignment]
    try:
        backend = create_backend(
            name.split(",")[0],
            [SPEC] * NUM_LAYERS,
            BackendLimits(
                device=torch.device("cuda"),
                dtype=DTYPE,
                max_num_seqs=num_seqs,
                max_num_tokens=num_tokens,
                max_model_len=max_len,
            ),
        )
        backend.bind_kv_caches([caches[layer % len(caches)] for layer in range(NUM_LAYERS)])
        yield backend
    finally:
        plans.use_tensor_cores = original


def run_layers(backend: AttentionBackend, qkv: torch.Tensor, out: torch.Tensor) -> None:
    """All layers of one step; qkv [layers, T, H + 2 K, D]."""
    h, k = SPEC.num_heads, SPEC.num_kv_heads
    for layer in range(NUM_LAYERS):
        heads = qkv[layer]
        backend.run(heads[:, :h], heads[:, h : h + k], heads[:, h + k :], out, layer)


def make_qkv(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random q, k and v of all layers, and an output."""
    heads = SPEC.num_heads + 2 * SPEC.num_kv_heads
    qkv = torch.empty((NUM_LAYERS, num_tokens, heads, SPEC.head_dim), dtype=DTYPE, device="cuda").normal_()
    return qkv, torch.empty((num_tokens, SPEC.num_heads, SPEC.head_dim), dtype=DTYPE, device="cuda")


def decode_cell(num_seqs: int, context: int) -> dict[str, Any]:
    """Times of one batch and context, per layer."""
    caches = make_caches(num_seqs * context)
    num_caches = len(caches)
    metadata = make_step([1] * num_seqs, [context] * num_seqs)
    qkv, out = make_qkv(num_seqs)
    times = {}
    for name in CANDIDATES:
        with candidate(name, caches, num_seqs=num_seqs, num_tokens=num_seqs, max_len=context) as backend:
            backend.plan(metadata, graph=True)
            run_layers(backend, qkv, out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run_layers(backend, qkv, out)
            times[name] = device_us(graph.replay, 15) / NUM_LAYERS
            del graph
    del caches
    torch.cuda.empty_cache()
    num_bytes = num_seqs * context * token_bytes()
    cell = {"num_seqs": num_seqs, "context": context, "distinct_caches": num_caches, "bytes": num_bytes, "us": times}
    print(num_seqs, context, {name: f"{us:.1f} us, {num_bytes / us / 1e6:.2f} TB/s" for name, us in times.items()})
    return cell


def prompt_case(name: str) -> dict[str, Any]:
    """Times of one prefill or chunked step, per layer: on the device in a captured graph, and of the host."""
    q_lens, kv_lens = PROMPTS[name]
    caches = make_caches(sum(kv_lens))
    metadata = make_step(q_lens, kv_lens)
    qkv, out = make_qkv(sum(q_lens))
    limits = {"num_seqs": len(q_lens), "num_tokens": sum(q_lens), "max_len": max(kv_lens)}
    times, launch_times = {}, {}
    for backend_name in ("triton", "flashinfer"):
        with candidate(backend_name, caches, **limits) as backend:
            backend.plan(metadata)
            launch_times[backend_name] = host_us(lambda backend=backend: run_layers(backend, qkv, out), 5) / NUM_LAYERS
            # Such steps are not captured in earnest: the graph serves one plan, to time the device without the host.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run_layers(backend, qkv, out)
            times[backend_name] = device_us(graph.replay, 5) / NUM_LAYERS
            del graph
    print(name, times, launch_times)
    return {"name": name, "us": times, "launch_us": launch_times}


def plan_times() -> list[dict[str, Any]]:
    """Host time of plan, at context 1024."""
    rows = []
    cases: list[tuple[str, tuple[int, ...], int, bool]] = [("decode", BATCHES, 1, True)]
    cases += [("chunked", (1, 100), 16, False), ("prefill", (1, 100), 1024, False)]
    for phase, batches, q_len, graph in cases:
        for num_seqs in batches:
            metadata = make_step([q_len] * num_seqs, [1024] * num_seqs)
            caches = make_caches(num_seqs * 1024)[:1]
            for name in ("triton", CUDA_CORES, TENSOR_CORES) if graph else ("triton", "flashinfer"):
                limits = {"num_seqs": num_seqs, "num_tokens": num_seqs * q_len, "max_len": 1024}
                with candidate(name, caches, **limits) as backend:
                    us = host_us(lambda backend=backend, step=metadata, graph=graph: backend.plan(step, graph=graph))
                rows.append({"phase": phase, "num_seqs": num_seqs, "backend": name, "us": us})
                print(rows[-1])
    return rows


def errors() -> dict[str, float]:
    """Largest relative L2 error of a token and head against float64; 4 sequences of 4096, decode."""
    num_seqs, context = 4, 4096
    caches = make_caches(num_seqs * context)[:1]
    metadata = make_step([1] * num_seqs, [context] * num_seqs)
    qkv, out = make_qkv(num_seqs)
    h, kv = SPEC.num_heads, SPEC.num_kv_heads
    worst = {}
    for name in CANDIDATES:
        with candidate(name, caches, num_seqs=num_seqs, num_tokens=num_seqs, max_len=context) as backend:
            backend.plan(metadata, graph=True)
            backend.run(qkv[0][:, :h], qkv[0][:, h : h + kv], qkv[0][:, h + kv :], out, 0)
        found = 0.0
        for seq in range(num_seqs):
            pages = metadata.paged_kv_indices.view(num_seqs, -1)[seq].long()
            assert caches[0].k is not None
            assert caches[0].v is not None
            k, v = (one.float()[pages].flatten(0, 1) for one in (caches[0].k, caches[0].v))
            reference = reference_attention(qkv[0][seq : seq + 1, :h], k, v, SPEC)[0]
            error = (out[seq].cpu().double() - reference).norm(dim=-1) / reference.norm(dim=-1)
            found = max(found, float(error.max()))
        worst[name] = found
    print(worst)
    return worst


def main() -> None:
    """Runs everything and writes one result file."""
    global SPEC
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=result_files.RESULTS / "attention-h200.json")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="fp8 has scales of 1")
    arguments = parser.parse_args()
    if arguments.kv_cache_dtype == "fp8_e4m3":
        SPEC = replace(SPEC, cache_dtype=torch.float8_e4m3fn)
    results = {
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "read_tb_s": read_bandwidth(),
        "errors": errors(),
        "plan": plan_times(),
        "prompts": [prompt_case(name) for name in PROMPTS],
        "decode": [decode_cell(num_seqs, context) for num_seqs in arguments.batches for context in CONTEXTS],
    }
    result_files.write(arguments.out, benchmark="attention", device="cuda", results=results)


if __name__ == "__main__":
    main()
