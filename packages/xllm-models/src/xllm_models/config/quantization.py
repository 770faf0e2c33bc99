"""The quantization of a checkpoint, parsed from its `quantization_config`.

Owns the parsing and the list of supported formats. Reading the weights belongs to `loading.quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import ConfigKeys

METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "awq", "gptq", "mxfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The format of all quantized weights. Tensor names show which weights are quantized."""

    method: str  # quant_method of the config
    format: str  # "fp8", "awq", "gptq" or "mxfp4"
    block: tuple[int, int] | None = None  # fp8: rows and columns per scale; None: one scale per row or tensor
    group_size: int = 0  # awq, gptq: inputs per scale; -1: all
    zero_offset: int = 0  # gptq: added to the stored zero points


def parse_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """None for plain weights; an unknown method or variant is a ValueError that names it."""
    given = raw.get("quantization_config") or raw.get("compression_config")
    if not given:
        return None
    keys = ConfigKeys({"quantization_config": given}).mapping("quantization_config")
    method = ConfigKeys(keys, "quantization_config").string("quant_method")
    if method == "fp8":
        return Quantization(
            method=method, format="fp8", block=_block(ConfigKeys(keys, "quantization_config"), "weight_block_size")
        )
    if method == "fbgemm_fp8":
        return Quantization(method=method, format="fp8")
    if method == "modelopt":
        names = ConfigKeys(keys, "quantization_config")
        algorithm = names.string("quant_algo", default="")
        if not algorithm and (names.find("kv_cache_quant_algo") or names.find("kv_cache_scheme")):
            return None
        if algorithm != "FP8":
            raise ValueError(f"quant_method 'modelopt' is supported with quant_algo 'FP8', got {algorithm!r}")
        return Quantization(method=method, format="fp8")
    if method == "mxfp4":
        return Quantization(method=method, format="mxfp4")
    if method == "compressed-tensors":
        return _compressed(keys)
    if method in ("awq", "gptq"):
        return _int4(method, ConfigKeys(keys, "quantization_config"))
    raise ValueError(f"quantization_config with quant_method {method!r} is not supported; supported: {list(METHODS)}")


def _block(keys: ConfigKeys, name: str) -> tuple[int, int] | None:
    block = keys.integers(name)
    if not block:
        return None
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"{name} must be two positive integers, got {list(block)}")
    return block[0], block[1]


def _compressed(config: Mapping[str, Any]) -> Quantization | None:
    """One group of fp8 weights, with one scale per tensor, channel or block; None if only the KV cache is quantized."""
    groups = ConfigKeys(config, "quantization_config").mapping("config_groups")
    if not groups and config.get("kv_cache_scheme"):
        return None
    schemes = [ConfigKeys(group, name).mapping("weights") for name, group in groups.items()]
    for scheme in schemes:
        keys = ConfigKeys(scheme, "config_groups")
        bits, form, strategy = keys.integer("num_bits"), keys.string("type"), keys.string("strategy")
        if len(schemes) == 1 and (bits, form) == (8, "float") and strategy in ("tensor", "channel"):
            return Quantization(method="compressed-tensors", format="fp8")
        if len(schemes) == 1 and (bits, form, strategy) == (8, "float", "block"):
            block = keys.require(_block(keys, "block_structure"), "block_structure")
            return Quantization(method="compressed-tensors", format="fp8", block=block)
    raise ValueError(
        "quantization_config of compressed-tensors is supported for one group of 8-bit float weights with the strategy "
        f"tensor, channel or block, got {[dict(scheme) for scheme in schemes]}"
    )


def _int4(method: str, keys: ConfigKeys) -> Quantization:
    bits, group_size = keys.integer("bits", "w_bit"), keys.integer("group_size", "q_group_size", default=128)
    if bits != 4:
        raise ValueError(f"quant_method {method!r} is supported with 4 bits, got {bits}")
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size must be -1 or at least 1, got {group_size}")
    if method == "awq":
        version = keys.string("version", default="gemm").lower()
        zero_point = keys.boolean("zero_point", default=True)
        if version != "gemm" or not zero_point:
            raise ValueError(
                "quant_method 'awq' is supported in version gemm with zero points, "
                f"got version {version!r} and zero_point {zero_point}"
            )
        return Quantization(method=method, format="awq", group_size=group_size)
    form = keys.string("checkpoint_format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format {form!r} of quant_method 'gptq' is not supported")
    # The gptq format stores each zero point minus one; gptq_v2 stores it as it is.
    return Quantization(method=method, format="gptq", group_size=group_size, zero_offset=int(form == "gptq"))
