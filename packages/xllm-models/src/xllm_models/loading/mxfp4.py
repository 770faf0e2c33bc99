"""Dequantizes MXFP4, 4-bit floats with one scale per 32 inputs, in which gpt-oss has its experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .quantized_files import QuantizedFiles, misfits

BLOCKS, SCALES = "_blocks", "_scales"  # after the name of the weight
_GROUP = 32  # inputs per scale
# The values of E2M1, by their 4 bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Weight:
    """Experts' weights [E, K, N], inputs before outputs as gpt-oss has them unquantized: w = q * 2^(scale - 127).

    blocks [E, N, K / 32, 16] uint8: 32 values of E2M1 each, the even inputs in the low halves of the bytes. scales
    [E, N, K / 32] uint8: exponents with a bias of 127 (E8M0). After HF transformers' `convert_moe_packed_tensors`.
    """

    checkpoint: QuantizedFiles
    name: str

    def parts(self) -> tuple[str, ...]:
        return (self.name + BLOCKS, self.name + SCALES)

    def faults(self) -> Iterator[str]:
        """The shapes of blocks and scales."""
        *outer, num_bytes = self.checkpoint.shape(self.name + BLOCKS)
        yield from misfits(self.checkpoint, self.name + SCALES, outer)
        if 2 * num_bytes != _GROUP:
            yield from misfits(self.checkpoint, self.name + BLOCKS, [*outer, _GROUP // 2])

    def get_shape(self) -> list[int]:
        num_experts, num_outputs, num_groups, _ = self.checkpoint.shape(self.name + BLOCKS)
        return [num_experts, num_groups * _GROUP, num_outputs]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        experts, inputs, outputs = region
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        packed = self.checkpoint.read(self.name + BLOCKS, (experts, outputs, groups, slice(0, _GROUP // 2)))
        scales = self.checkpoint.read(self.name + SCALES, (experts, outputs, groups))
        halves = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)  # [E, N, groups, 32]
        values = torch.ldexp(torch.tensor(_E2M1)[halves.int()], scales.int()[..., None] - 127).flatten(-2)
        first = inputs.start - groups.start * _GROUP
        return values[..., first : first + inputs.stop - inputs.start].mT
