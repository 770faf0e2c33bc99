"""The table of checkpoint tensors that have no effect here, each with the condition under which that is so.

Owns the names that exporters use, the conditions and their check against the tensors' values. A tensor that the model
needs never comes here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..config import ModelConfig
from ..layers.rotary import RotaryEmbedding
from .state_dict import StateDict

_LOGGER = logging.getLogger(__name__)

_BF16_ROUNDING = 2.0**-7
_SMALLEST_FP16 = 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor that no parameter is loaded from, and the model it came with."""

    name: str
    state_dict: StateDict
    module: nn.Module
    config: ModelConfig

    @property
    def values(self) -> torch.Tensor:
        """Read only where a condition depends on them: prediction heads are large."""
        return self.state_dict.get_tensor(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One row of the table. `fault` returns what contradicts the condition, or None."""

    what: str
    names: re.Pattern[str]  # searched in the tensor's name
    reason: str
    fault: Callable[[_Tensor], str | None]
    applies: Callable[[str, ModelConfig], bool] = lambda name, config: True


def faults_of_unexpected(
    names: Iterable[str], where: Mapping[str, StateDict], module: nn.Module, config: ModelConfig
) -> tuple[list[str], list[str]]:
    """The `names` that no kind of the table has, and messages for those whose condition does not hold.

    Logs each kind of tensors that have no effect once.
    """
    unknown: list[str] = []
    faults: list[str] = []
    found: dict[str, list[str]] = {}
    for name in names:
        kind = next((one for one in KINDS if one.names.search(name) and one.applies(name, config)), None)
        if kind is None:
            unknown.append(name)
            continue
        tensor = _Tensor(name=name, state_dict=where[name], module=module, config=config)
        fault = kind.fault(tensor)
        if fault is not None:
            faults.append(f"{name} ({kind.what} has no effect only if {kind.reason}; {fault})")
        found.setdefault(kind.what, []).append(name)
    if not unknown and not faults:
        for kind in KINDS:
            if several := found.get(kind.what):
                _LOGGER.warning(
                    "tensors without effect: %d, for example %s (%s: %s)",
                    len(several),
                    several[0],
                    kind.what,
                    kind.reason,
                )
    return unknown, faults


def _never(tensor: _Tensor) -> str | None:
    return None


def _all_equal(value: float) -> Callable[[_Tensor], str | None]:
    def fault(tensor: _Tensor) -> str | None:
        values = tensor.values
        others = values.float() != value
        return f"it holds {_sample(values[others])}" if others.any() else None

    return fault


def _cache_scale(tensor: _Tensor) -> str | None:
    """Scales of a cache are per tensor, head or channel. A learned scale of the same name has other sizes."""
    sizes = {1, tensor.config.num_heads, tensor.config.num_kv_heads}
    sizes |= {size * tensor.config.head_dim for size in sizes - {1}}
    shape = tensor.values.shape
    if shape.numel() not in sizes:
        return f"its shape {list(shape)} is not one per tensor, head or channel"
    return _of_quantization(tensor)


def _of_quantization(tensor: _Tensor) -> str | None:
    raw = tensor.config.raw
    if not (raw.get("quantization_config") or raw.get("compression_config")):
        return "config.json has no quantization_config"
    return None


def _frequencies(tensor: _Tensor) -> str | None:
    """Frequencies of the config's rope, scaled or not: before 4.32, transformers scaled the positions instead."""
    values = tensor.values.float().flatten()
    closest = float("inf")
    for want in _rope_frequencies(tensor.module):
        if want.shape == values.shape:
            error = ((values - want).abs() - _SMALLEST_FP16).clamp(min=0) / want
            closest = min(closest, float(error.max()))
    if closest <= _BF16_ROUNDING:
        return None
    if closest == float("inf"):
        return f"the model has no rotary embedding with {values.numel()} frequencies"
    return f"its relative difference is up to {closest:.3g}"


def _cosines_or_sines(tensor: _Tensor) -> str | None:
    table = tensor.values.float()
    table = table.reshape(-1, table.shape[-1])  # [P, R], or [P, R / 2]
    function = torch.cos if tensor.name.endswith("cos_cached") else torch.sin
    positions = torch.arange(table.shape[0], dtype=torch.float32).unsqueeze(1)
    for frequencies in _rope_frequencies(tensor.module):
        want = function(positions * frequencies)
        for columns in (want, torch.cat((want, want), dim=1)):
            if columns.shape == table.shape and (columns - table).abs().max() <= _BF16_ROUNDING:
                return None
    return "it differs"


def _rope_frequencies(module: nn.Module) -> Iterator[torch.Tensor]:
    """[R / 2] fp32 radians per position of each rotary embedding of the model, scaled and not scaled."""
    ropes = {(one.rope, one.num_features): one for one in module.modules() if isinstance(one, RotaryEmbedding)}
    for embedding in ropes.values():
        yield from embedding.frequencies()


def _mask_or_zero_bias(tensor: _Tensor) -> str | None:
    values = tensor.values
    if values.ndim < 2:
        return _all_equal(0.0)(tensor)
    rows, columns = values.shape[-2:]
    lower = torch.ones(rows, columns).tril()
    if values.numel() == lower.numel() and torch.equal(values.reshape(rows, columns).float(), lower):
        return None
    return f"its shape is {list(values.shape)}, and it is not lower triangular with ones"


def _mask_value(tensor: _Tensor) -> str | None:
    values = tensor.values
    return None if values.numel() == 1 and float(values) <= -1e4 else f"it holds {_sample(values)}"


def _counts_from_0(tensor: _Tensor) -> str | None:
    values = tensor.values.flatten()
    return None if torch.equal(values.long(), torch.arange(values.numel())) else f"it holds {_sample(values)}"


def _trivial_groups(tensor: _Tensor) -> str | None:
    groups = tensor.values.flatten().long()
    size = tensor.config.quantization.group_size if tensor.config.quantization is not None else 0
    in_order = size > 0 and torch.equal(groups, torch.arange(groups.numel()) // size)
    # llm-compressor writes -1 where inputs are not reordered.
    if in_order or (groups == 0).all() or (groups == -1).all():
        return None
    return f"it holds {_sample(groups)}"


def _empty(tensor: _Tensor) -> str | None:
    size = tensor.values.numel()
    return f"it has {size} bytes" if size else None


def _sample(values: torch.Tensor) -> str:
    shown = values.flatten()[:4].tolist()
    return f"{shown}" if values.numel() <= 4 else f"{shown[:4]} and {values.numel() - 4} more"


_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def _is_next_token_layer(name: str, config: ModelConfig) -> bool:
    """Whether config.json counts the layer among the multi-token prediction layers, which follow the decoder's."""
    layer = _LAYER.match(name)
    count = config.raw.get("num_nextn_predict_layers")
    if layer is None or not isinstance(count, int):
        return False
    return 0 <= int(layer[1]) - config.num_layers < count


# Names: vLLM's maybe_remap_kv_scale_name, compressed-tensors, AutoFP8, llm-compressor, ModelOpt, Quark and
# transformers. The first kind that matches a name is its kind.
KINDS: tuple[_Kind, ...] = (
    _Kind(
        what="scale of a quantized KV cache",
        names=re.compile(
            r"(^|\.)(q|k|v|kv|qkv|prob)_(scale|zero_point)$"
            r"|\.([kv]|kv)_cache[._](scale|offset|zero_point)$"
            r"|\.[qkv]_proj\.output_scale$|\.prob_output_scale$"
            r"|\.[qkv]_bmm_quantizer\._(amax|scale)$"
        ),
        reason="the keys, values or queries that it scales have the model's dtype",
        fault=_cache_scale,
    ),
    _Kind(
        what="scale of quantized activations",
        names=re.compile(
            r"[._](input|output|act|activation)_(scale|scale_inv|scale_ub|zero_point|global_scale)$"
            r"|\.(input|output)_quantizer\._(amax|scale)$"
        ),
        reason="a quantized checkpoint is computed with activations in the model's dtype",
        fault=_of_quantization,
    ),
    _Kind(
        what="table of rotary frequencies",
        names=re.compile(r"(^|[._])rotary\w*\.(\w+_)?inv_freq$"),
        reason="its frequencies are those of the config's rope parameters",
        fault=_frequencies,
    ),
    _Kind(
        what="rotary table",
        names=re.compile(r"(^|[._])rotary\w*\.(cos|sin)_cached$"),
        reason="it is computed from the config's rope parameters",
        fault=_cosines_or_sines,
    ),
    _Kind(
        what="fill value of a mask",
        names=re.compile(r"\.masked_bias$"),
        reason="it excludes keys, at -10000 or less",
        fault=_mask_value,
    ),
    _Kind(
        what="causal mask or bias",
        names=re.compile(r"\.(attn|attention|self_attn|self_attention)\.bias$"),
        reason="it is the lower triangle, which attention applies itself, or 0",
        fault=_mask_or_zero_bias,
    ),
    _Kind(
        what="bias",
        names=re.compile(r"\.bias$"),
        reason="it is 0 (GPTQ exporters add a bias to each layer)",
        fault=_all_equal(0.0),
    ),
    _Kind(
        what="list of positions",
        names=re.compile(r"(^|\.)position_ids$"),
        reason="it counts from 0",
        fault=_counts_from_0,
    ),
    _Kind(
        what="zero point of a symmetric quantization",
        names=re.compile(r"[._]weight_zero_point$"),
        reason="it is 0",
        fault=_all_equal(0.0),
    ),
    _Kind(
        what="scale of a weight that is not quantized",
        names=re.compile(r"[._]weight_scale(_inv)?$"),
        reason="it is 1",
        fault=_all_equal(1.0),
    ),
    _Kind(
        what="group index",
        names=re.compile(r"[._]g_idx$"),
        reason="the inputs are in the order of their groups",
        fault=_trivial_groups,
    ),
    _Kind(
        what="layer of a multi-token prediction head",
        names=re.compile(r"^(mtp|model\.mtp)\."),
        reason="there is no speculative decoding",
        fault=_never,
    ),
    _Kind(
        what="layer that num_nextn_predict_layers counts",
        names=_LAYER,
        reason="there is no speculative decoding",
        fault=_never,
        applies=_is_next_token_layer,
    ),
    _Kind(
        what="state of Transformer Engine",
        names=re.compile(r"\._extra_state$"),
        reason="it is empty",
        fault=_empty,
    ),
)
