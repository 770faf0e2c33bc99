"""The checks of the conformance suite by name, the tensor comparisons behind them, and their error."""

from __future__ import annotations

from enum import Enum

import torch

TOLERANCES = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
    torch.float8_e4m3fn: 8e-2,  # of cache entries: another order of sums may round to the next one, 2^-4 away
}
"""Largest error of graph execution against eager execution of the unpadded step, relative to the largest value (or 1).
It isn't 0, since a GEMM with another number of rows may sum in another order."""


class Check(Enum):
    """What a step of the suite is checked for, in the order in which a step runs the checks."""

    STEP_RAISED = "step_raised"  # the executor raised for a step that eager execution serves
    LOGITS = "logits"  # within the tolerance of eager execution
    HIDDEN_STATES = "hidden_states"  # the same, for a step without logits
    GREEDY = "greedy"  # the largest logit is the one of eager execution
    CACHE_CONTENTS = "cache_contents"  # keys and values in the step's slots
    CACHE_UNTOUCHED = "cache_untouched"  # no other slot has changed
    PADDED_CONTRACT = "padded_contract"  # the padded metadata keeps the metadata contract
    PADDED_FINITE = "padded_finite"  # no NaN or infinity in any row of the graph's outputs, padding included
    PADDED_BITS = "padded_bits"  # bit-equal to eager execution of the same padded inputs and plan
    # Checks of whole scenarios.
    CHUNKED_LOGITS = "chunked_logits"  # eager execution gives a prompt the same logits whole and in chunks
    EAGER_STEPS = "eager_steps"  # no step ran eagerly


class ConformanceError(AssertionError):
    """A step of the executor under test failed a check.

    Attributes:
        check: which one.
    """

    def __init__(self, check: Check, message: str) -> None:
        super().__init__(check, message)
        self.check = check

    def __str__(self) -> str:
        return str(self.args[1])


def check_close(check: Check, name: str, actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> float:
    """Compares two tensors of any shape within `factor` times the tolerance of their dtype; returns the largest error.

    Raises:
        ConformanceError: another shape or dtype, a value that is not finite, or a larger error.
    """
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        raise ConformanceError(
            check,
            f"{name}: shape {list(actual.shape)} {actual.dtype}; eager has {list(expected.shape)} {expected.dtype}",
        )
    if actual.numel() == 0:
        return 0.0
    dtype = actual.dtype
    actual, expected = actual.double(), expected.double()  # fp8 has few ops
    if not bool(torch.isfinite(actual).all()):
        raise ConformanceError(check, f"{name}: NaN or infinity")
    scale = max(1.0, float(expected.abs().max()))
    error = float((actual - expected).abs().max())
    if not error <= factor * TOLERANCES[dtype] * scale:
        raise ConformanceError(check, f"{name}: differs from eager by {error:.3g}; values are up to {scale:.3g}")
    return error


def check_greedy(actual: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    """Compares the greedy tokens of logits [n, vocab], except in rows whose two largest logits differ by at most
    `error`.

    Raises:
        ConformanceError: another token.
    """
    if actual.numel() == 0:
        return
    first, second = expected.topk(2, dim=-1).values.double().unbind(-1)
    differs = (actual.argmax(-1) != expected.argmax(-1)) & (first - second > error)
    if bool(differs.any()):
        raise ConformanceError(
            Check.GREEDY, f"greedy tokens of rows {differs.nonzero()[:, 0].tolist()} differ from eager"
        )


def check_bits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares two tensors byte for byte.

    Raises:
        ConformanceError: another shape or other bytes.
    """
    if actual.shape != expected.shape or not torch.equal(as_bytes(actual), as_bytes(expected)):
        raise ConformanceError(
            Check.PADDED_BITS, f"{name}: not bit-equal to eager execution of the same padded inputs and plan"
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as uint8, so that equal NaNs compare as equal. [..., last * itemsize]"""
    return tensor.contiguous().view(torch.uint8)
