"""Time of load_model against safetensors' own load_file plus copy, on a random checkpoint.

    python benchmarks/loading.py [--device cpu] [--gigabytes 2] [--repeats 5] [--out FILE.json]

Each load runs in its own process, alternating between the two loaders, from a warm page cache. The time of load_file
includes a copy of every tensor into allocated memory; that of load_model includes the model's construction.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import write
from safetensors.torch import load_file, save_file

from xllm_models import load_model

# A Llama with about 64 MB per layer in bf16.
LAYER_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}


def make_checkpoint(directory: Path, gigabytes: float) -> None:
    """Random bf16 tensors in files of eight layers."""
    hidden, intermediate, vocab = (LAYER_CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    layer_shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layer_bytes = 2 * sum(torch.Size(shape).numel() for shape in layer_shapes.values())
    num_layers = round((gigabytes * 1e9 - 4 * vocab * hidden) / layer_bytes)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (vocab, hidden)
    files: list[dict[str, torch.Tensor]] = [{name: _random(shape) for name, shape in shapes.items()}]
    index: dict[str, str] = {}
    for layer in range(num_layers):
        if layer % 8 == 0:
            index |= _flush(files.pop(), directory, len(index))
            files.append({})
        files[0] |= {f"model.layers.{layer}.{name}.weight": _random(shape) for name, shape in layer_shapes.items()}
    index |= _flush(files.pop(), directory, len(index))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(LAYER_CONFIG | {"num_hidden_layers": num_layers}))


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int16).to(torch.bfloat16)


def _flush(tensors: dict[str, torch.Tensor], directory: Path, number: int) -> dict[str, str]:
    name = f"model-{number:05d}.safetensors"
    save_file(tensors, directory / name)
    return dict.fromkeys(tensors, name)


def plain_load(directory: Path, device: str) -> Callable[[], object]:
    """load_file of every file, then a copy of every tensor into allocated memory."""

    def load() -> object:
        kept = []
        for path in sorted(directory.glob("*.safetensors")):
            for tensor in load_file(path).values():
                kept.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor))
        return kept

    return load


def measure(kind: str, directory: Path, device: str) -> dict[str, float]:
    """Seconds of one load in this process, and its peak anonymous memory in bytes."""
    torch.empty(1, device=device)
    load: Callable[[], object]
    load = plain_load(directory, device) if kind == "load_file" else lambda: load_model(directory, device=device)
    before = peak = _anonymous_memory()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _anonymous_memory())

    threading.Thread(target=sample, daemon=True).start()
    start = time.perf_counter()
    kept = load()
    if device != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - start
    done.set()
    peak = max(peak, _anonymous_memory())
    del kept
    return {"seconds": seconds, "peak_bytes": peak - before}


def _anonymous_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, directory = arguments.measure
        print(json.dumps(measure(kind, Path(directory), arguments.device)))
        return
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), arguments.gigabytes)
        num_bytes = sum(path.stat().st_size for path in Path(name).glob("*.safetensors"))
        runs: dict[str, list[dict[str, float]]] = {"load_file": [], "load_model": []}
        for _ in range(arguments.repeats + 1):
            for kind, values in runs.items():
                command = [sys.executable, __file__, "--device", arguments.device, "--measure", kind, name]
                values.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
                print(f"{kind}: {values[-1]}", file=sys.stderr, flush=True)
    seconds = {kind: median(run["seconds"] for run in values[1:]) for kind, values in runs.items()}
    peak = max(run["peak_bytes"] for run in runs["load_model"])
    results = {
        "checkpoint_bytes": num_bytes,
        "seconds": seconds,
        "ratio": seconds["load_model"] / seconds["load_file"],
        "peak_anonymous_bytes_over_checkpoint": peak / num_bytes,
        "runs": {kind: values[1:] for kind, values in runs.items()},
    }
    summary = {key: value for key, value in results.items() if key != "runs"}
    print(json.dumps(summary, indent=1))
    if arguments.out:
        write(arguments.out, benchmark="loading", device=arguments.device, results=results)


if __name__ == "__main__":
    main()
