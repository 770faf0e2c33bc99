"""Checks that the token ids of a step are in the model's vocabulary."""

from __future__ import annotations

import torch


def reading_waits(device: torch.device) -> bool:
    """Whether the host waits for the device's queued work when it reads a tensor there."""
    return device.type != "cpu"


def check_token_ids(tokens: torch.Tensor, vocab_size: int) -> None:
    """Raises `ValueError` for the first id outside [0, vocab_size). tokens [T] int32 or int64, on any device."""
    if tokens.shape[0] == 0:
        return
    lowest, highest = torch.aminmax(tokens)
    if lowest.item() >= 0 and highest.item() < vocab_size:
        return
    row, token_id = next((row, x) for row, x in enumerate(tokens.tolist()) if not 0 <= x < vocab_size)
    raise ValueError(f"tokens[{row}] is {token_id}; the vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}")
