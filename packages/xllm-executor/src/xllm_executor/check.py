"""`python -m xllm_executor check`: compares a model under graphs with eager execution, and several ranks with one.

Owns the options, the refusal of arguments that cannot work, and the report. `check_steps` runs the steps, `check_ranks`
the ranks. `python -m xllm_models compare` compares the model itself with transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from xllm_models import CausalLM, TensorParallel, load_model, register_port

from .check_ranks import over_ranks
from .check_steps import MAX_MODEL_LEN, Finding, graph_options, make_harness, raised, under_graphs

__all__ = ["MAX_MODEL_LEN", "Options", "add_arguments", "make_harness", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line's options."""

    directory: Path
    model: str | None = None  # MODULE:CLASS of an unregistered port
    device: str = "cpu"
    dtype: str = "float32"
    attention: str = "torch"
    kv_cache_dtype: str = "auto"
    tp: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="CHECKPOINT", help="directory with config.json and safetensors")
    parser.add_argument("--model", help="MODULE:CLASS of a port that is not registered, for this checkpoint")
    parser.add_argument("--device", default="cpu", help="cpu records graphs and replays them, cuda captures them")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--attention", default="torch", help="backend under graphs; the eager reference uses torch")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (default): the model's; or fp8_e4m3")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="also compare N ranks with one")


def run(arguments: argparse.Namespace, write: Callable[[str], object]) -> int:
    """Writes the report. Returns 0 if every check passed, else 1. Raises ValueError or OSError for unusable input."""
    options = Options(**{name: getattr(arguments, name) for name in Options.__slots__})
    _check_options(options)
    num_failed = 0
    for name, finding in _findings(options):
        num_failed += finding is not None
        write(f"ok    {name}" if finding is None else f"FAIL  {name}: {finding}")
    write("PASS" if not num_failed else f"FAIL: {num_failed} of the above")
    return int(num_failed > 0)


def _check_options(options: Options) -> None:
    """ValueError for options that no model could be checked with."""
    if options.tp < 1:
        raise ValueError(f"--tp is {options.tp}; it must be at least 1")
    kind, _, index = options.device.partition(":")
    if options.tp > 1 and index:
        raise ValueError(f"--device {options.device} names one device; --tp {options.tp} needs --device {kind}")
    if kind == "cuda" and options.tp > max(torch.cuda.device_count(), 1):
        raise ValueError(f"--tp {options.tp} needs as many CUDA devices; there are {torch.cuda.device_count()}")
    if kind == "meta":
        raise ValueError("--device meta has no values to compare")


def _findings(options: Options) -> Iterator[Finding]:
    try:
        model = _load(options)
    except (ValueError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - the model may raise anything
        yield "the model is built and loaded", raised(error)
        return
    if model.config.num_positions < MAX_MODEL_LEN:
        raise ValueError(f"the model has {model.config.num_positions} positions; the check needs {MAX_MODEL_LEN}")
    if options.tp > 1:
        _check_shards(model, options.tp)
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # for a few tokens, threads cost more than they save
    for graph in graph_options(model.device):
        yield from under_graphs(model, options.attention, graph)
    if options.tp > 1:
        yield from over_ranks(
            model,
            partial(_load, options),
            num_ranks=options.tp,
            device=options.device,
            attention=options.attention,
        )


def _check_shards(model: CausalLM, num_ranks: int) -> None:
    """ValueError for a model that this number of ranks cannot share."""
    try:
        type(model)(model.config, device="meta", dtype=model.dtype, tp=TensorParallel(rank=0, size=num_ranks))
    except ValueError as error:
        raise ValueError(f"--tp {num_ranks}: {error}") from error


def _load(options: Options, rank: int = 0, size: int = 1, device: str | None = None) -> CausalLM:
    if options.model is not None:
        register_port(options.model, options.directory)
    return load_model(
        options.directory,
        device=device or options.device,
        dtype=options.dtype,
        tp_rank=rank,
        tp_size=size,
        kv_cache_dtype=options.kv_cache_dtype,
    )
