"""Rotary position embedding of queries and keys, from a table of cosines and sines; also fused with their RMSNorm.

Owns the rotation. The table (its frequencies and scaling) belongs to `layers.rotary`.
T tokens, H query heads, K kv heads, D head dim, P positions of the table, R rotary features.
"""

from __future__ import annotations

import torch

from xllm_attention.op_library import define_op

from .norm import normalize
from .triton_kernels import triton_kernel


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    firsts, seconds = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    first, second = x[..., firsts], x[..., seconds]
    out = x.new_empty(x.shape)
    torch.sub(first * cos, second * sin, out=out[..., firsts])
    torch.add(second * cos, first * sin, out=out[..., seconds])
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # Rounded to the model's dtype before the products, as in HF transformers.
    cos, sin = cos_sin.index_select(0, positions).to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


@define_op(kernels=triton_kernel("rotary", "rotary"))
def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (i, i + R/2) of the first R features of each head, or `interleaved` ones (2 i, 2 i + 1).

    The half-split layout is that of Llama, the interleaved one that of arXiv:2104.09864, Cohere and GLM.
    q [T, H, D], k [T, K, D], any strides; positions [T] int32 or int64, each below P; cos_sin [P, R] fp32, R/2
    cosines then R/2 sines, R even and at most D. Features beyond R pass through. The results are new and contiguous.
    """
    return _rotary(q, k, positions, cos_sin, interleaved)


@define_op(kernels=triton_kernel("rotary", "qk_norm_rope"))
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of each head with its weight [D], then `rotary`: one pass over views of a fused projection.

    The arguments and results of both; `unit_offset` as in `rms_norm`, `interleaved` as in `rotary`.
    """
    q, k = normalize(q, q_weight, eps, unit_offset), normalize(k, k_weight, eps, unit_offset)
    return _rotary(q, k, positions, cos_sin, interleaved)
