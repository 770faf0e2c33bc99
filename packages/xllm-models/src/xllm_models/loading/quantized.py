"""Dequantizes the weights of a quantized checkpoint, region by region, when they are read.

Owns the formats fp8, with one scale per block, row or tensor, and 4-bit integers as AWQ and GPTQ pack them.
N outputs, K inputs of a linear layer; its weight is [N, K].
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..config import Quantization
from .loader import WeightError
from .mxfp4 import BLOCKS, SCALES, Mxfp4Weight
from .quantized_files import QuantizedFiles, misfits
from .state_dict import PlainSlice, StateDict, TensorSlice

_LOGGER = logging.getLogger(__name__)

_FP8_SCALES = ("_scale_inv", "_scale")  # after the name of the weight

# AWQ's order of the eight 4-bit values in an int32, from the low end.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def dequantized(state_dicts: Sequence[StateDict], quantization: Quantization) -> list[StateDict]:
    """State dicts in which each quantized layer has a dequantized `weight`. Logs one warning.

    A WeightError lists every tensor whose shape does not fit `quantization`.
    """
    checkpoint = QuantizedFiles(state_dicts)
    found = [_DequantizedStateDict(own, checkpoint, quantization) for own in state_dicts]
    parts = set().union(*(state_dict.parts() for state_dict in found))
    for state_dict in found:
        state_dict.hide(parts)
    faults = [f"  {fault}" for state_dict in found for fault in state_dict.faults()]
    if faults:
        raise WeightError("\n".join(("the checkpoint does not fit its quantization_config", *faults)))
    _LOGGER.warning(
        "no kernel computes with %s weights here: they are dequantized while they are loaded, "
        "and take the memory of the model's dtype",
        quantization.method,
    )
    return [*found]


class _DequantizedStateDict:
    """One state dict: plain tensors unchanged, quantized weights dequantized."""

    def __init__(self, own: StateDict, checkpoint: QuantizedFiles, quantization: Quantization) -> None:
        self._own = own
        self._weights = dict(_quantized_weights(own, checkpoint, quantization))
        self._names = dict.fromkeys([*own.keys(), *self._weights])

    def parts(self) -> set[str]:
        """The tensors that the dequantized weights are computed from, except the fp8 weights themselves."""
        return {part for weight in self._weights.values() for part in weight.parts()}

    def hide(self, parts: set[str]) -> None:
        self._names = {name: None for name in self._names if name not in parts}

    def faults(self) -> Iterator[str]:
        """Tensors of the wrong shape: name, found, expected."""
        for weight in self._weights.values():
            yield from weight.faults()

    def has(self, name: str) -> bool:
        return name in self._names

    def keys(self) -> list[str]:
        return list(self._names)

    def get_slice(self, name: str) -> TensorSlice:
        return self._weights[name] if name in self._weights else PlainSlice(self._own, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            return self._own.get_tensor(name)
        weight = self._weights[name]
        return weight[tuple(slice(0, size) for size in weight.get_shape())]


def _quantized_weights(
    own: StateDict, checkpoint: QuantizedFiles, quantization: Quantization
) -> Iterator[tuple[str, _Fp8Weight | Mxfp4Weight | _AwqWeight | _GptqWeight]]:
    """The dequantized name and weight of every quantized layer whose main tensor is in `own`."""
    for name in list(own.keys()):
        layer, _, last = name.rpartition(".")
        if quantization.format == "fp8":
            scale = next((name + end for end in _FP8_SCALES if checkpoint.has(name + end)), None)
            if scale is not None and checkpoint.is_fp8(name):
                if len(shape := checkpoint.shape(name)) not in (2, 3):
                    raise WeightError(f"{name} (checkpoint {list(shape)}, expected two or three dimensions)")
                yield name, _Fp8Weight(checkpoint=checkpoint, name=name, scale=scale, block=quantization.block)
        elif quantization.format == "mxfp4":
            weight = name.removesuffix(BLOCKS)
            if weight != name:
                if not checkpoint.has(weight + SCALES):
                    raise ValueError(f"quantized weight {name} lacks {weight + SCALES}")
                if len(shape := checkpoint.shape(name)) != 4:
                    raise WeightError(f"{name} (checkpoint {list(shape)}, expected four dimensions)")
                yield weight, Mxfp4Weight(checkpoint=checkpoint, name=weight)
        elif last == "qweight":
            if len(shape := checkpoint.shape(name)) != 2:
                raise WeightError(f"{name} (checkpoint {list(shape)}, expected two dimensions)")
            missing = [part for part in ("qzeros", "scales") if not checkpoint.has(f"{layer}.{part}")]
            if missing:
                raise ValueError(f"quantized layer {layer} lacks {', '.join(missing)}")
            kind = _AwqWeight if quantization.format == "awq" else _GptqWeight
            yield f"{layer}.weight", kind(checkpoint=checkpoint, layer=layer, quantization=quantization)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fp8Weight:
    """w = q * scale: q [..., N, K] fp8, with a leading dimension for stacked weights (experts).

    scale per block [..., N / rows, K / columns] (rounded up), or [..., S, 1] with one scale per N / S rows. S is 1, N,
    or 2 for gate and up in one tensor. Dimensions of size 1 may be absent.
    """

    checkpoint: QuantizedFiles
    name: str
    scale: str
    block: tuple[int, int] | None

    def parts(self) -> tuple[str, ...]:
        return (self.scale,)

    def faults(self) -> Iterator[str]:
        """The scale's shape."""
        shape, found = self.get_shape(), self.checkpoint.shape(self.scale)
        *entries, num_outputs, num_inputs = shape
        if self.block is not None:
            rows, columns = self.block
            expected = [*entries, -(-num_outputs // rows), -(-num_inputs // columns)]
            yield from misfits(self.checkpoint, self.scale, expected)
            return
        per_entry, rest = divmod(math.prod(found), math.prod(entries) or 1)
        few = per_entry in (1, 2) if entries else per_entry == 1  # of stacked weights, one per half: gate and up
        if rest or not (few or per_entry == num_outputs) or num_outputs % per_entry:
            yield f"{self.scale} (checkpoint {list(found)}, expected {[*entries, num_outputs, 1]} or {[*entries, 1]})"

    def get_shape(self) -> list[int]:
        return list(self.checkpoint.shape(self.name))

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        values = self.checkpoint.read(self.name, region).float()
        *entries, outputs, inputs = region
        scale = self.checkpoint.whole(self.scale).float()
        *num_entries, num_outputs, _ = self.get_shape()
        if self.block is None:
            scale = scale.reshape(*num_entries, -1, 1)
            sizes = (num_outputs // scale.shape[-2], self.get_shape()[-1])
        else:
            sizes = self.block
        rows, columns = (
            torch.arange(r.start, r.stop) // size for r, size in zip((outputs, inputs), sizes, strict=True)
        )
        return values.mul_(scale[tuple(entries)][..., rows, :][..., columns])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Int4Weight:
    """Base of AWQ and GPTQ weights: w[n, k] = (q[k, n] - zero[group of k, n]) * scale[group of k, n].

    scales [G, N]; qzeros [G, N / 8] int32. A subclass unpacks q and the zeros.
    """

    checkpoint: QuantizedFiles
    layer: str
    quantization: Quantization

    def parts(self) -> tuple[str, ...]:
        return tuple(f"{self.layer}.{part}" for part in ("qweight", "qzeros", "scales"))

    def get_dtype(self) -> str:
        return "F32"

    def _misfitting_parts(self, num_outputs: int, num_groups: int) -> Iterator[str]:
        """The shapes of zeros and scales."""
        yield from misfits(self.checkpoint, f"{self.layer}.qzeros", [num_groups, -(-num_outputs // 8)])
        yield from misfits(self.checkpoint, f"{self.layer}.scales", [num_groups, num_outputs])

    def _group_size(self, num_inputs: int) -> int:
        return num_inputs if self.quantization.group_size == -1 else self.quantization.group_size

    def _groups(self, inputs: slice, num_inputs: int) -> torch.Tensor:
        """The group of each input of the slice."""
        return torch.arange(inputs.start, inputs.stop) // self._group_size(num_inputs)

    def _dequantized(
        self, values: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor, outputs: slice
    ) -> torch.Tensor:
        """values [k, n]; zeros [G, n]; groups [k] -> [n, k] fp32."""
        scales = self.checkpoint.read(f"{self.layer}.scales", (slice(0, zeros.shape[0]), outputs)).float()
        return ((values - zeros[groups]) * scales[groups]).t()

    def _zeros(self, outputs: slice, order: tuple[int, ...]) -> torch.Tensor:
        """Zero points [G, n] int32 of the output slice."""
        name = f"{self.layer}.qzeros"
        packed = slice(outputs.start // 8, -(-outputs.stop // 8))
        words = self.checkpoint.read(name, (slice(0, self.checkpoint.shape(name)[0]), packed))
        first = outputs.start - packed.start * 8
        return _unpack(words, order)[:, first : first + outputs.stop - outputs.start]


class _AwqWeight(_Int4Weight):
    """qweight [K, N / 8] int32: eight outputs per word, in AWQ's order."""

    __slots__ = ()

    def faults(self) -> Iterator[str]:
        """The shapes of zeros and scales."""
        num_outputs, num_inputs = self.get_shape()
        return self._misfitting_parts(num_outputs, -(-num_inputs // self._group_size(num_inputs)))

    def get_shape(self) -> list[int]:
        num_inputs, num_words = self.checkpoint.shape(f"{self.layer}.qweight")
        return [num_words * 8, num_inputs]

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        outputs, inputs = region
        packed = slice(outputs.start // 8, -(-outputs.stop // 8))
        words = self.checkpoint.read(f"{self.layer}.qweight", (inputs, packed))
        first = outputs.start - packed.start * 8
        values = _unpack(words, _AWQ_ORDER)[:, first : first + outputs.stop - outputs.start]
        groups = self._groups(inputs, self.get_shape()[1])
        return self._dequantized(values, self._zeros(outputs, _AWQ_ORDER), groups, outputs)


class _GptqWeight(_Int4Weight):
    """qweight [K / 8, N] int32: eight inputs per word. g_idx [K], if present, is each input's group."""

    __slots__ = ()

    def parts(self) -> tuple[str, ...]:
        return (*_Int4Weight.parts(self), f"{self.layer}.g_idx")

    def faults(self) -> Iterator[str]:
        """The shapes of zeros and scales, and g_idx if present; the scales then give the number of groups."""
        num_outputs, num_inputs = self.get_shape()
        name = f"{self.layer}.g_idx"
        if not self.checkpoint.has(name):
            yield from self._misfitting_parts(num_outputs, -(-num_inputs // self._group_size(num_inputs)))
            return
        num_groups = self.checkpoint.shape(f"{self.layer}.scales")[0]
        yield from self._misfitting_parts(num_outputs, num_groups)
        wrong_shape = list(misfits(self.checkpoint, name, [num_inputs]))
        yield from wrong_shape
        if not wrong_shape:
            first, last = (int(group) for group in self.checkpoint.whole(name).aminmax())
            if first < 0 or last >= num_groups:
                yield f"{name} (groups {first} to {last}, expected 0 to {num_groups - 1})"

    def get_shape(self) -> list[int]:
        num_words, num_outputs = self.checkpoint.shape(f"{self.layer}.qweight")
        return [num_outputs, num_words * 8]

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        outputs, inputs = region
        packed = slice(inputs.start // 8, -(-inputs.stop // 8))
        words = self.checkpoint.read(f"{self.layer}.qweight", (packed, outputs))
        first = inputs.start - packed.start * 8
        values = _unpack(words.t(), tuple(range(8))).t()[first : first + inputs.stop - inputs.start]
        if self.checkpoint.has(f"{self.layer}.g_idx"):
            groups = self.checkpoint.read(f"{self.layer}.g_idx", (inputs,)).long()
        else:
            groups = self._groups(inputs, self.get_shape()[1])
        zeros = self._zeros(outputs, tuple(range(8))) + self.quantization.zero_offset
        return self._dequantized(values, zeros, groups, outputs)


def _unpack(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """words [a, b] int32 -> [a, 8b] int32; nibble i of a word is its value number `order[i]`."""
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return nibbles[..., torch.tensor(order).argsort()].flatten(-2)
