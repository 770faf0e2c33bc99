"""The `compare` command: parses the arguments, runs the comparison, and writes the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from ..config import parse_dtype, read_config
from ..loading.model import load_model, register_port
from ..registry import read_model_config
from .blind_spots import blind_spots
from .dump import read_dump, write_dump
from .hf import trace_hf
from .ours import trace_ours
from .plot import write_plot
from .report import TOLERANCES, compare_traces
from .text import format_report
from .trace import Trace
from .unread import ReadKeys

DEFAULT_PROMPT = "The capital of France is the city that most people in the world would name first."
NUM_RANDOM_TOKENS = 24  # for a checkpoint without a tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_dir", type=Path, help="checkpoint directory with config.json and safetensors")
    parser.add_argument("--against", default="hf", help="'hf' (HF transformers, the default) or a dump's file")
    parser.add_argument("--dtype", default="float32", help="of both sides: float32 (default), bfloat16 or float16")
    parser.add_argument("--model", help="MODULE:CLASS of a port that is not registered, for this checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", help="text; needs the checkpoint's tokenizer")
    parser.add_argument("--prompt-ids", help="token ids instead of text: 1,2,3")
    parser.add_argument("--tolerance", type=float, help="largest relative error (default: by dtype)")
    parser.add_argument("--plot", type=Path, help="write the error by module as a picture (.png, .svg, ...)")
    parser.add_argument("--dump", type=Path, help="write both traces to this directory, ours and the reference")


def run(arguments: argparse.Namespace, write: Callable[[str], object]) -> int:
    """0 if all entries are within the tolerance, else 1. ValueError and OSError for bad input."""
    dtype = parse_dtype(arguments.dtype)
    directory: Path = arguments.model_dir
    if arguments.model is not None:
        register_port(arguments.model, directory)
    against: str = arguments.against
    reference = None if against == "hf" else read_dump(Path(against))
    if reference is not None and (arguments.prompt is not None or arguments.prompt_ids is not None):
        raise ValueError("a dump has its own tokens: --prompt and --prompt-ids go with --against hf")
    token_ids = _token_ids(arguments) if reference is None else reference.token_ids
    # longrope chooses its factors by the served length. HF takes the prompt's.
    model = load_model(directory, device=arguments.device, dtype=dtype, max_model_len=len(token_ids))
    keys = ReadKeys(model, read_config(directory))
    with keys.watching():
        ours = trace_ours(model, token_ids)
    if reference is None:
        reference = trace_hf(
            directory,
            token_ids,
            dtype=dtype,
            device=model.device,
            choices=ours.choices,
            rename=model.weight_map.family_name,
        )
    tolerance = TOLERANCES[dtype] if arguments.tolerance is None else arguments.tolerance
    report = compare_traces(ours, reference, model.weight_map, tolerance=tolerance, names=model.compare_names)
    for spot in blind_spots(model, len(token_ids), trace=ours, unread=keys.unread()):
        write(f"note: {spot}")
    write(format_report(report))
    if arguments.dump is not None:
        _dump(arguments.dump, ours, reference)
    if arguments.plot is not None:
        write_plot(report, arguments.plot)
    return 0 if report.passed else 1


def _dump(directory: Path, ours: Trace, reference: Trace) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_dump(ours, directory / "ours.safetensors")
    write_dump(reference, directory / "reference.safetensors")


def _token_ids(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The prompt's tokens; without a prompt and a tokenizer, random ones of a fixed seed."""
    directory: Path = arguments.model_dir
    vocab_size = read_model_config(directory)[1].vocab_size
    if arguments.prompt_ids is not None:
        if arguments.prompt is not None:
            raise ValueError("--prompt and --prompt-ids exclude each other")
        ids = tuple(int(one) for one in arguments.prompt_ids.split(","))
    elif arguments.prompt is not None or (directory / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        ids = tuple(AutoTokenizer.from_pretrained(directory)(arguments.prompt or DEFAULT_PROMPT).input_ids)
    else:
        generator = torch.Generator().manual_seed(0)
        ids = tuple(torch.randint(0, vocab_size, (NUM_RANDOM_TOKENS,), generator=generator).tolist())
    outside = [one for one in ids if not 0 <= one < vocab_size]
    if outside or not ids:
        raise ValueError(f"prompt ids must be at least one, each below the vocabulary of {vocab_size}, got {ids}")
    return ids
