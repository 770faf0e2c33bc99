"""Call cost and device time of every compute op of xllm_models, and of a decode step's chain of matrix products.

    python benchmarks/ops.py [--device cuda] [--dtype bfloat16] [--out FILE.json]

Shapes are Qwen3-0.6B's. Call cost is the host's time of one asynchronous call (CUDA), or the whole time (CPU).
Device time is the mean of many calls in a captured graph, each over its own weights (CUDA only).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import write

from xllm_models import ops

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 1024, 16, 8, 128, 3072, 151936, 28
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
EXPERTS, TOP_K, EXPERT_FEATURES = 16, 4, 384

Call = Callable[[], object]


def cases(num_tokens: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    """One call of each op at Qwen3-0.6B's layer shapes."""

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * 0.1).to(dtype)

    hidden, residual, weight, head_weight = (
        random(num_tokens, HIDDEN),
        random(num_tokens, HIDDEN),
        random(HIDDEN),
        random(HEAD_DIM),
    )
    heads = random(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k = heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS]
    positions = torch.arange(num_tokens, device=device, dtype=torch.int32)
    table = torch.randn(num_tokens, HEAD_DIM, device=device)
    gate_up = random(num_tokens, 2 * INTERMEDIATE)
    router_logits = random(num_tokens, EXPERTS)
    experts = (
        random(EXPERTS, 2 * EXPERT_FEATURES, HIDDEN),
        random(EXPERTS, HIDDEN, EXPERT_FEATURES),
    )
    matrix = random(*MATRICES["qkv"])
    return {
        "rms_norm": lambda: ops.rms_norm(hidden, weight, 1e-6),
        "fused_add_rms_norm": lambda: ops.fused_add_rms_norm(hidden, residual, weight, 1e-6),
        "silu_and_mul": lambda: ops.silu_and_mul(gate_up),
        "gelu_and_mul": lambda: ops.gelu_and_mul(gate_up, "tanh"),
        "rotary": lambda: ops.rotary(q, k, positions, table),
        "qk_norm_rope": lambda: ops.qk_norm_rope(q, k, head_weight, head_weight, positions, table, 1e-6),
        "linear (qkv)": lambda: ops.linear(hidden, matrix),
        "torch linear (qkv)": lambda: torch.nn.functional.linear(hidden, matrix),
        "moe": lambda: ops.fused_experts(hidden, *ops.topk_softmax(router_logits, TOP_K, True), *experts),
    }


def call_cost_us(call: Call, device: str, repeats: int = 7, calls: int = 200) -> float:
    """Median over the repeats of the mean time per call, in microseconds. Each repeat starts with an idle device."""
    for _ in range(10):
        call()
    times = []
    for _ in range(repeats):
        if device != "cpu":
            torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    if device != "cpu":
        torch.accelerator.synchronize()
    return median(times)


def device_time_us(body: Call, repeats: int = 20) -> float:
    """Time of one replay of a CUDA graph of `body`, in microseconds: the median of the repeats."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        body()
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def repeated(call: Call, times: int) -> Call:
    def body() -> None:
        for _ in range(times):
            call()

    return body


def matrix_chain(num_tokens: int, dtype: torch.dtype, linear: Callable[..., Any]) -> dict[str, float]:
    """Device time in us of all matrix products of a decode step, each with its own weight, and of one per matrix."""
    weights = {
        name: [(torch.randn(*shape, device="cuda") * 0.02).to(dtype) for _ in range(LAYERS)]
        for name, shape in MATRICES.items()
    }
    head = (torch.randn(VOCAB, HIDDEN, device="cuda") * 0.02).to(dtype)
    inputs = {name: torch.randn(num_tokens, shape[1], device="cuda").to(dtype) for name, shape in MATRICES.items()}
    hidden = inputs["qkv"]

    def chain() -> None:
        for layer in range(LAYERS):
            for name in MATRICES:
                linear(inputs[name], weights[name][layer])
        linear(hidden, head)

    def one_kind(name: str) -> Call:
        return lambda: [linear(inputs[name], weight) for weight in weights[name]]

    result = {name: device_time_us(one_kind(name)) / LAYERS for name in MATRICES}
    return result | {"head": device_time_us(lambda: linear(hidden, head)), "chain": device_time_us(chain)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 100, 1024])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    table: dict[str, Any] = {}
    for num_tokens in arguments.tokens:
        row: dict[str, Any] = {}
        for name, call in cases(num_tokens, arguments.device, dtype).items():
            row[name] = {"call_us": round(call_cost_us(call, arguments.device), 2)}
            if arguments.device != "cpu":
                row[name]["device_us"] = round(device_time_us(repeated(call, 50)) / 50, 2)
            print(f"{num_tokens:6} tokens  {name:20} {row[name]}", flush=True)
        table[str(num_tokens)] = row
    chains: dict[str, Any] = {}
    if arguments.device != "cpu":
        for num_tokens in [n for n in arguments.tokens if n <= 128]:
            for label, linear in (("ops.linear", ops.linear), ("torch", torch.nn.functional.linear)):
                times = {name: round(t, 2) for name, t in matrix_chain(num_tokens, dtype, linear).items()}
                chains.setdefault(str(num_tokens), {})[label] = times
                print(f"{num_tokens:6} tokens  products, {label}: {times}", flush=True)
    if arguments.out:
        results = {"dtype": arguments.dtype, "ops": table, "matrix_products_us": chains}
        write(arguments.out, benchmark="ops", device=arguments.device, results=results)


if __name__ == "__main__":
    main()
