"""`load_model`: from a checkpoint directory to a model that is ready to run."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from ..causal_lm import CausalLM
from ..config import parse_dtype, parse_kv_cache_dtype, read_config
from ..layers import TensorParallel
from ..registry import architecture, read_model_config, register_model
from .checkpoint import open_checkpoint


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    progress: bool = False,
) -> CausalLM:
    """Build the model of a HF checkpoint directory on `device` and load its weights.

    Args:
        path: directory with config.json and safetensors weights.
        device: the weights' device.
        dtype: of weights and activations; None takes the config's.
        tp_rank, tp_size: see `TensorParallel`.
        max_model_len: the longest sequence to serve; None: `config.num_positions`. It sizes the rotary table. It may
            exceed max_position_embeddings where rope scaling extends the context, by up to its factor. With longrope
            (Phi-3) it chooses between the short and the long factors.
        kv_cache_dtype: `auto` is the model's dtype. `fp8_e4m3` (or `fp8`) takes the scales of each layer from the
            checkpoint; they are 1.0 if it has none.
        progress: show a progress bar on stderr.

    Raises:
        FileNotFoundError: the directory, its config.json or a weight file does not exist.
        ValueError: an unsupported architecture, configuration, dtype or device, or weights that do not fit.
    """
    directory = Path(path)
    model_class, config = read_model_config(directory)
    if max_model_len is not None:
        if not 0 < max_model_len <= config.max_num_positions:
            raise ValueError(
                f"max_model_len {max_model_len} is outside 1 to {config.max_num_positions}, the model's positions "
                f"(rope type {config.rope.rope_type!r}, factor {config.rope.factor}, "
                f"max_position_embeddings {config.max_position_embeddings})"
            )
        config = replace(config, max_model_len=max_model_len)
    config = replace(config, kv_cache_dtype=parse_kv_cache_dtype(kv_cache_dtype))
    checkpoint = open_checkpoint(directory)
    model = model_class(
        config,
        device=device,
        dtype=parse_dtype(dtype) if isinstance(dtype, str) else dtype,
        tp=TensorParallel(rank=tp_rank, size=tp_size),
    )
    model.load_weights(checkpoint, tp_rank, tp_size, progress=progress)
    return model


def register_port(target: str, path: str | Path) -> None:
    """Register the class `target`, MODULE:CLASS, for the architecture of the checkpoint at `path`, in this process.

    ValueError for a target that is not such a class, and for an architecture that is registered already.
    """
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(f"--model must be MODULE:CLASS, got {target!r}")
    try:
        imported = import_module(module)
    except ImportError as error:
        raise ValueError(f"--model {target}: importing {module} failed: {error}") from error
    model_class = getattr(imported, name, None)
    if model_class is None:
        raise ValueError(f"module {module} has no {name}")
    register_model(architecture(read_config(Path(path))), model_class)
