"""Loads a checkpoint for a native C++ model, and computes digests that compare checkpoints between ranks.

`xllm_models` does the loading itself: sharding, tying, padding, dequantisation and errors. So a native model and the
Python model start from the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from xllm_attention import AttentionSpec
from xllm_models import load_model
from xllm_models.loading import SafetensorsStateDict, open_checkpoint


def load_state(
    path: str,
    *,
    device: str,
    dtype: str | None,
    tp_rank: int,
    tp_size: int,
    max_model_len: int | None = None,
    progress: bool,
) -> dict[str, Any]:
    """Loads a checkpoint as `load_model` does, and returns the parts of the model.

    Returns:
        args: `ModelConfig.to_model_args()`.
        tensors: parameters and buffers of this rank by name, tied ones under every name, in the model's own memory.
        layers: one dict per attention layer, the fields of its `AttentionSpec`.
        dtype, device: of the weights.
    """
    model = load_model(
        path,
        device=device,
        dtype=dtype,
        tp_rank=tp_rank,
        tp_size=tp_size,
        max_model_len=max_model_len,
        progress=progress,
    )
    tensors = {
        name: tensor.detach()
        for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors
    }
    return {
        "args": model.config.to_model_args(),
        "tensors": tensors,
        "layers": [asdict(spec) for spec in model.layer_specs if isinstance(spec, AttentionSpec)],
        "dtype": model.dtype,
        "device": model.device,
    }


def checkpoint_digests(path: str) -> dict[str, str]:
    """Per tensor of a checkpoint, a digest of its shape, dtype and first, middle and last row.

    It distinguishes checkpoints of different models, sizes or trainings in milliseconds, whatever their size. It is no
    checksum: it misses a difference in any other row.
    """
    return {
        name: _digest(state_dict, name)
        for state_dict in open_checkpoint(Path(path))
        for name in sorted(state_dict.keys())
    }


def _digest(state_dict: SafetensorsStateDict, name: str) -> str:
    tensor_slice = state_dict.get_slice(name)
    shape = tuple(tensor_slice.get_shape())
    digest = hashlib.blake2b(f"{shape} {tensor_slice.get_dtype()}".encode(), digest_size=8)
    if len(shape) < 2:
        digest.update(_bytes(state_dict.get_tensor(name)))
    elif 0 not in shape:
        rest = tuple(slice(0, size) for size in shape[1:])
        for row in sorted({0, shape[0] // 2, shape[0] - 1}):
            digest.update(_bytes(tensor_slice[(slice(row, row + 1), *rest)]))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
