"""What counts as equal, and the error that says what does not. Owns no tensor."""

from __future__ import annotations

import torch

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest error of graph against eager on unpadded inputs, relative to the largest value (or 1): row counts change the
order of sums."""


class ConformanceError(AssertionError):
    """A step under a graph differs from the same step run eagerly, or breaks a promise of its runner."""


def check_close(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Checks two tensors of any shape within the tolerance of their dtype; returns the largest error."""
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        raise ConformanceError(f"{what} is {list(ours.shape)} {ours.dtype}; eager {list(theirs.shape)} {theirs.dtype}")
    if ours.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(ours).all()):
        raise ConformanceError(f"{what} is not finite")
    scale = max(1.0, float(theirs.abs().max()))
    error = float((ours.double() - theirs.double()).abs().max())
    if not error <= TOLERANCES[ours.dtype] * scale:
        raise ConformanceError(f"{what} differs by {error:.3g} from eager, of values up to {scale:.3g}")
    return error


def check_greedy(ours: torch.Tensor, theirs: torch.Tensor, error: float) -> None:
    """Checks that the greedy tokens of logits [n, vocab] agree wherever the error does not decide between two."""
    if ours.numel() == 0:
        return
    first, second = theirs.topk(2, dim=-1).values.double().unbind(-1)
    differs = (ours.argmax(-1) != theirs.argmax(-1)) & (first - second > error)
    if bool(differs.any()):
        raise ConformanceError(f"greedy tokens of rows {differs.nonzero()[:, 0].tolist()} differ from eager")


def check_bits(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Checks that two tensors hold the same bytes."""
    if ours.shape != theirs.shape or not torch.equal(as_bytes(ours), as_bytes(theirs)):
        raise ConformanceError(f"{what} is not bit-equal to eager on the same padded inputs and plan")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, NaN included."""
    return tensor.contiguous().view(torch.uint8)
