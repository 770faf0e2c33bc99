"""Reads the scales of an fp8 KV cache from a checkpoint, under the names that exporters use.

Names: llm-compressor, compressed-tensors, AutoFP8, ModelOpt and Quark, as vLLM's maybe_remap_kv_scale_name lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from xllm_attention import Attention, CacheScales

from .loader import WeightError
from .state_dict import StateDict

_FP8_MAX: Final = 448.0
_LAYER: Final = re.compile(r"^(.*\blayers\.(\d+))\.")
# Name -> what its value is divided by. The first group says whose scale it is.
_NAMES: Final = (
    (re.compile(r"\.([kv])_scale$"), 1.0),
    (re.compile(r"\.([kv])_proj\.(?:output|kv_cache)_scale$"), 1.0),
    (re.compile(r"\.([kv])_cache[._]scale$"), 1.0),
    (re.compile(r"\.([kv])_bmm_quantizer\._amax$"), _FP8_MAX),  # the largest absolute value
    (re.compile(r"\.(kv)_(?:cache_)?scale$"), 1.0),  # one for keys and values
)
# Offsets of an asymmetric quantization, which fp8 does not have, and scales in units that are not known.
_NOT_READ: Final = re.compile(
    r"\.(?:k|v|kv)_zero_point$|kv_cache_offset$|\.(?:k|v|kv)_cache[._](?:offset|zero_point)$|\.qkv_scale$"
    r"|\.[kv]_bmm_quantizer\._scale$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundScales:
    """The scales that a checkpoint has, checked but not yet set."""

    names: tuple[str, ...]  # of the tensors that were read
    of_layers: tuple[tuple[CacheScales, float, float], ...]  # each with its k_scale and v_scale

    def load(self) -> None:
        """Sets the scales of the layers."""
        for scales, k, v in self.of_layers:
            scales.load(k, v)


def read_cache_scales(module: nn.Module, state_dicts: Iterable[StateDict], num_layers: int) -> FoundScales:
    """Reads and checks the scales of all layers with an fp8 cache; 1.0 if the checkpoint has none of any layer.

    Raises:
        WeightError: a scale that is not one positive number, two of one kind in a layer, an offset that is not 0, a
            layer without attention, or scales of some layers, or of keys or values, only.
    """
    layers = _layers(module)
    where = {name: one for one in state_dicts for name in list(one.keys())}
    found: dict[str, dict[str, float]] = {prefix: {} for prefix in layers}
    names: list[str] = []
    for name in where:
        layer = _LAYER.match(name)
        if layer is None or int(layer[2]) >= num_layers:  # a layer of a prediction head
            continue
        kind, divisor = _kind(name)
        if kind is None:
            if _NOT_READ.search(name):
                _check_zero(name, where)
                names.append(name)
            continue
        if layer[1] not in found:
            raise WeightError(f"{name} is the scale of a KV cache, which layer {layer[2]} does not have")
        names.append(name)
        for one in kind:
            if one in found[layer[1]]:
                raise WeightError(f"{name} is a second {one}_scale of the KV cache of layer {layer[2]}")
            found[layer[1]][one] = _number(name, where) / divisor
    absent = [f"{one}_scale of {prefix}" for prefix, scales in found.items() for one in "kv" if one not in scales]
    if names and absent and any(found.values()):
        raise WeightError(f"scales of the KV cache are in the checkpoint, but not {', '.join(absent)}")
    of_layers = tuple((layers[prefix], one.get("k", 1.0), one.get("v", 1.0)) for prefix, one in found.items())
    for (scales, k, v), prefix in zip(of_layers, found, strict=True):
        try:
            scales.check(k, v)
        except ValueError as error:
            raise WeightError(f"KV cache of {prefix}: {error}") from error
    return FoundScales(names=tuple(names), of_layers=of_layers)


def _layers(module: nn.Module) -> dict[str, CacheScales]:
    """The scales of each layer with an fp8 cache, by the layer's name in the module."""
    layers = {}
    for name, one in module.named_modules():
        if isinstance(one, Attention) and one.spec.cache_scales is not None:
            layer = _LAYER.match(name)
            assert layer is not None, f"{name} is in no layer"
            layers[layer[1]] = one.spec.cache_scales
    return layers


def _kind(name: str) -> tuple[str | None, float]:
    """`k`, `v`, or `kv` for both; None if the tensor is no scale that is read."""
    for pattern, divisor in _NAMES:
        if match := pattern.search(name):
            return match[1], divisor
    return None, 1.0


def _number(name: str, where: Mapping[str, StateDict]) -> float:
    values = where[name].get_tensor(name).float().flatten()
    if values.numel() == 0 or not bool((values == values[0]).all()):
        raise WeightError(
            f"{name} has {values.numel()} unequal scales; served is one per layer for keys and one for values"
        )
    return float(values[0])


def _check_zero(name: str, where: Mapping[str, StateDict]) -> None:
    if name.endswith("_scale") or bool((where[name].get_tensor(name).float() != 0).any()):
        raise WeightError(f"{name} is not read: an fp8 KV cache has a scale for keys and one for values, and no offset")
