"""The rotary embedding layer: its frequencies, by rope type, and the table of cosines and sines that the op reads.

P positions, R rotary features of a head (R / 2 frequencies).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from ..config import RopeConfig
from ..ops import qk_norm_rope, rotary
from .norm import RMSNorm


class RotaryEmbedding(nn.Module):
    """q [T, H, D], k [T, K, D] at positions [T] -> both rotated, after the norms of their heads if there are any.

    The table `cos_sin` [P, R] is fp32 in every model dtype. It is computed on the CPU, so that every device reads the
    same values. `interleaved`: the layout of `ops.rotary`.
    """

    cos_sin: torch.Tensor  # [P, R] fp32: R / 2 cosines, then R / 2 sines

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int, *, interleaved: bool = False) -> None:
        super().__init__()
        self.rope = rope
        self.num_features = int(head_dim * rope.partial_rotary_factor)
        self.interleaved = interleaved
        self.register_buffer("cos_sin", rotary_table(rope, head_dim, num_positions), persistent=False)

    def frequencies(self) -> Iterator[torch.Tensor]:
        """[R / 2] fp32 radians per position: without the scaling of the rope type, and with it where all share it."""
        num_positions = self.cos_sin.shape[0]
        default = RopeConfig(theta=self.rope.theta, partial_rotary_factor=self.rope.partial_rotary_factor)
        yield inverse_frequencies(default, self.num_features, num_positions)
        if self.rope.rope_type != "dynamic":
            yield inverse_frequencies(self.rope, self.num_features, num_positions)

    def forward(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if norms is None:
            return rotary(q, k, positions, self.cos_sin, self.interleaved)
        q_norm, k_norm = norms
        return qk_norm_rope(
            q,
            k,
            q_norm.weight,
            k_norm.weight,
            positions,
            self.cos_sin,
            q_norm.eps,
            q_norm.unit_offset,
            self.interleaved,
        )


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """[num_positions, R] fp32 on the CPU, scaled by the type's attention factor."""
    num_features = int(head_dim * rope.partial_rotary_factor)
    if num_features % 2 or not 0 < num_features <= head_dim:
        raise ValueError(
            f"rotary features must be even and at most head_dim {head_dim}, got {num_features} "
            f"(partial_rotary_factor {rope.partial_rotary_factor})"
        )
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    angles = positions.unsqueeze(1) * inverse_frequencies(rope, num_features, num_positions)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_scaling


def inverse_frequencies(rope: RopeConfig, num_features: int, num_positions: int) -> torch.Tensor:
    """[R / 2] fp32 radians per position; for the dynamic type [P, R / 2], one row per position."""
    exponents = torch.arange(0, num_features, 2, dtype=torch.float32, device="cpu") / num_features
    if rope.rope_type == "dynamic":
        return _dynamic(rope, exponents, num_features, num_positions)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    if rope.rope_type == "yarn":
        return _yarn(rope, frequencies, num_features)
    if rope.rope_type == "longrope":
        return frequencies / _longrope_factors(rope, num_features, num_positions)
    return frequencies


def _dynamic(rope: RopeConfig, exponents: torch.Tensor, num_features: int, num_positions: int) -> torch.Tensor:
    """NTK-aware base that grows with the length (HF transformers' `dynamic`).

    HF takes the length from the current batch. Here position p uses the base of length p + 1, as HF does when it
    decodes token by token. The result then depends neither on chunked prefill nor on the rest of the batch.
    """
    if num_features <= 2:
        raise ValueError(f"rope type 'dynamic' needs more than 2 rotary features, got {num_features}")
    trained = rope.original_max_position_embeddings
    lengths = torch.arange(1, num_positions + 1, dtype=torch.float64, device="cpu").clamp(min=trained)
    growth = (rope.factor * lengths / trained - (rope.factor - 1)) ** (num_features / (num_features - 2))
    bases = (rope.theta * growth).float().unsqueeze(1)
    return 1.0 / (bases**exponents)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    trained = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    # 0 at the longest wavelength of the band, 1 at the shortest.
    blend = (trained / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > trained / rope.low_freq_factor, frequencies / rope.factor, between)
    return torch.where(wavelengths < trained / rope.high_freq_factor, frequencies, scaled)


def _longrope_factors(rope: RopeConfig, num_features: int, num_positions: int) -> torch.Tensor:
    """The long factors where more positions are served than were trained (arXiv:2402.13753).

    HF switches a growing sequence from short to long factors and drops its KV cache then. A cache with keys of both
    would be wrong, so here the longest served length chooses once, for all sequences.
    """
    factors = rope.long_factor if num_positions > rope.original_max_position_embeddings else rope.short_factor
    if len(factors) != num_features // 2:
        raise ValueError(f"rope type 'longrope' needs {num_features // 2} factors, got {len(factors)}")
    return torch.tensor(factors, dtype=torch.float32, device="cpu")


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, num_features: int) -> torch.Tensor:
    """Interpolation below `beta_slow` turns over the trained length, none above `beta_fast` (arXiv:2309.00071)."""

    def feature_of(turns: float) -> float:
        trained = rope.original_max_position_embeddings
        return num_features * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = feature_of(rope.beta_fast), feature_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_features - 1)
    if low == high:
        high += 0.001
    indices = torch.arange(num_features // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((indices - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * (1 - keep) + frequencies * keep
