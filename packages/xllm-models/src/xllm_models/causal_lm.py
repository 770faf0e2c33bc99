"""`CausalLM`: the base class of every model family, used by runners, serving hosts and the loader.

Owns construction, logits and weight loading. Construction allocates each weight once, on the device. The structure
belongs to the family, in `models/`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, CacheScales, LayerSpec, StateLayer, group_windows, kv_groups
from xllm_metadata import CacheSpec

from .config import LAYER_TYPES, TEXT_MODEL_TYPE, ModelConfig, text_config
from .layers import KeepDtypeParameter, ParallelLMHead, TensorParallel
from .loading import (
    StateDict,
    WeightError,
    WeightMap,
    dequantized,
    in_layer_layout,
    load_weights,
    read_cache_scales,
    without_prefixes,
)
from .loading.state_dict import read_once
from .passes import NextWeights, PartialSums, run_on_meta

_LOGGER = logging.getLogger(__name__)


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head. Its inputs are the T tokens of a step, without a batch dimension.

    A family sets `weight_map`, `config_defaults` for keys that its config.json may omit, and `own_config` for keys that
    `ModelConfig` does not have, which it reads from `config.own`. It implements `build`, which assigns `self.model` and
    `self.lm_head`.
    """

    weight_map: ClassVar[WeightMap]
    text_model_types: ClassVar[tuple[str, ...]] = ()  # allowed in a nested text_config; (): all
    optional_keys: ClassVar[Collection[str] | None] = None  # of config.OPTIONAL_KEYS, those that HF's class reads
    layer_types: ClassVar[Collection[str]] = LAYER_TYPES  # allowed in the config's layer_types
    config_defaults: ClassVar[Mapping[str, Any]] = {}  # in HF names
    own_config: ClassVar[Mapping[str, Any]] = {}  # in HF names, with defaults
    compare_names: ClassVar[Mapping[str, str | None]] = {}  # for `compare`: end of our module's name -> HF's, or None

    weights_loaded: bool
    """Whether the weights are set. `load_weights` sets it; set it to True after filling the parameters otherwise."""

    model: nn.Module  # (input_ids [T], positions [T]) -> hidden [T, hidden]
    lm_head: ParallelLMHead

    def __init__(
        self,
        config: ModelConfig | Mapping[str, Any],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        tp: TensorParallel | None = None,
    ) -> None:
        """Allocate the model on `device` in `dtype` (None: the config's). The weights are not set yet.

        `config` may be a mapping in config.json or ModelArgs names. `self.device` is the weights' device with its
        index. ValueError for a device that is not available, a size that the ranks of `tp` cannot shard, a partial sum
        that is not summed once, and a module that cannot run on meta tensors (`passes`).
        """
        super().__init__()
        if not isinstance(config, ModelConfig):
            config = self.parse_config(text_config(config))
        self.config = config
        if config.unread:
            listed = ", ".join(f"{key}={value!r}" for key, value in config.unread.items())
            _LOGGER.warning("config keys without effect in %s, as in transformers: %s", type(self).__name__, listed)
        self.device = _resolve_device(device)
        self.dtype = dtype or config.dtype
        self.tp = tp or TensorParallel()
        with torch.device("meta"):
            self.build(config, self.tp)
        if config.kv_cache_dtype is not None:
            _set_cache_dtype(self, config.kv_cache_dtype)
        for parameter in self.parameters():
            if not isinstance(parameter, KeepDtypeParameter):
                parameter.data = parameter.data.to(self.dtype)
        next_weights = NextWeights()
        run_on_meta(self, decoder=self.model, lm_head=self.lm_head, observers=(PartialSums(), next_weights))
        _materialize(self, self.device)
        next_weights.assign()
        self.weights_loaded = False
        self.layer_specs = _layer_specs(self)
        self.eval()

    @property
    def cache_specs(self) -> list[tuple[CacheSpec, ...]]:
        """The cache tensors that each layer needs, by layer_id. A host allocates and binds them in this order.

        Layers of equal sliding window form a KV cache group, which `CacheSpec.group` and `window` describe.
        """
        groups, windows = kv_groups(self.layer_specs), group_windows(self.layer_specs)
        return [
            tuple(replace(one, group=group, window=windows[group]) for one in spec.cache_specs(self.dtype))
            for spec, group in zip(self.layer_specs, groups, strict=True)
        ]

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """The family's configuration from config.json or ModelArgs names; see `ModelConfig.from_dict` for errors.

        This is the only way in which a configuration is parsed. A family whose keys differ overrides it, changes `raw`
        and calls this method. `load_model`, `compare` and a model's constructor pass the text model's keys, flat
        (`config.text_config`).
        """
        raw = text_config(raw)
        found = raw.get(TEXT_MODEL_TYPE)
        if cls.text_model_types and found is not None and found not in cls.text_model_types:
            raise ValueError(
                f"model_type {found!r} of text_config is not supported by {cls.__name__}; "
                f"supported: {', '.join(cls.text_model_types)}"
            )
        return ModelConfig.from_dict(
            raw,
            defaults=cls.config_defaults,
            own=cls.own_config,
            reads=cls.optional_keys,
            layer_types=cls.layer_types,
        )

    @abstractmethod
    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        """Assign `self.model` and `self.lm_head`. The default device is meta.

        Parameters and persistent buffers are filled from the checkpoint. Non-persistent buffers are constants and must
        be made on the CPU. Parameters get the model's dtype, except `KeepDtypeParameter`; buffers keep their dtype.
        """

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions [T] int32 or int64 -> hidden [T, hidden], inside a `forward_context`."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [T, hidden] -> logits [n, vocab] in the model's dtype, of the rows `indices` [n] (None: all T).

        RuntimeError if the weights are not set.
        """
        if not self.weights_loaded:
            self.check_weights_loaded()
        rows = hidden if indices is None else hidden.index_select(0, indices)
        logits: torch.Tensor = self.lm_head(rows)
        return logits

    def check_weights_loaded(self) -> None:
        """RuntimeError if the weights are not set: never loaded, or partly overwritten by a load that failed."""
        if not self.weights_loaded:
            raise RuntimeError(
                f"{type(self).__name__} has no loaded weights: call load_weights; after filling the parameters "
                "otherwise, set weights_loaded = True"
            )

    def load_weights(
        self, state_dicts: Sequence[StateDict], tp_rank: int = 0, tp_size: int = 1, *, progress: bool = False
    ) -> None:
        """Set parameters and persistent buffers from the state dicts, in place; errors: `loading.load_weights`.

        Each state dict's `get_tensor` is asked once per weight, unless it has `get_slice`, which reads regions.
        ValueError if `tp_rank` and `tp_size` are not those of `self.tp`. An override that does not call this method
        must set `weights_loaded`.
        """
        if (tp_rank, tp_size) != (self.tp.rank, self.tp.size):
            raise ValueError(
                f"weights of rank {tp_rank} of {tp_size} do not fit a model built as rank {self.tp.rank} of "
                f"{self.tp.size}"
            )
        weight_map = self.weight_map.for_num_layers(self.config.num_layers)
        state_dicts = without_prefixes(read_once(state_dicts), weight_map)
        ignored = weight_map.count_ignored(name for one in state_dicts for name in list(one.keys()))
        if ignored:
            listed = ", ".join(f"{count} of {pattern}" for pattern, count in ignored.items())
            _LOGGER.warning("tensors of the checkpoint that %s ignores: %s", type(self).__name__, listed)
        if self.config.quantization is not None:
            state_dicts = dequantized(state_dicts, self.config.quantization)
        state_dicts = in_layer_layout(state_dicts, weight_map)
        tied = self.config.tie_word_embeddings
        scales = None
        if self.config.kv_cache_dtype is not None:
            scales = read_cache_scales(self, state_dicts, self.config.num_layers)
            weight_map = replace(weight_map, ignored=(*weight_map.ignored, *scales.names))
        try:
            load_weights(self, weight_map, state_dicts, tied=tied, config=self.config, progress=progress)
        except WeightError:  # raised before the first write
            raise
        except BaseException:
            self.weights_loaded = False
            raise
        if scales is not None:
            scales.load()
        self.weights_loaded = True


def _resolve_device(device: torch.device | str) -> torch.device:
    """The device with its index: "cuda" is the current CUDA device."""
    try:
        return torch.empty(0, device=device).device
    # PyTorch asserts for a device type that it was built without. An unknown name or index is a RuntimeError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"device {str(device)!r} is not available: {first_line}") from error


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters storage on the device, in their dtype, and move buffers there.

    A buffer on the meta device gets storage if the checkpoint fills it, which it does if the buffer is persistent.
    """
    made: dict[int, nn.Parameter] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if id(parameter) not in made:
                storage = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                made[id(parameter)] = type(parameter)(storage, requires_grad=False)
            owner.register_parameter(name, made[id(parameter)])
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(owner, name, buffer.to(device))
            elif name in owner._non_persistent_buffers_set:
                raise RuntimeError(f"buffer {prefix}.{name} has no values: name its device where it is made")
            else:
                setattr(owner, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def _set_cache_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Give every attention layer a cache of this dtype, with scales of its own."""
    for layer in module.modules():
        if isinstance(layer, Attention):
            layer.spec = replace(layer.spec, cache_dtype=dtype, cache_scales=CacheScales())


def _layer_specs(module: nn.Module) -> list[LayerSpec]:
    """The spec of every layer with a cache, by layer_id."""
    layers = (layer for layer in module.modules() if isinstance(layer, Attention | StateLayer))
    specs: dict[int, LayerSpec] = {layer.layer_id: layer.spec for layer in layers}
    if sorted(specs) != list(range(len(specs))):
        raise RuntimeError(f"ids of the layers with a cache must count from 0 without a gap, got {sorted(specs)}")
    return [specs[layer_id] for layer_id in range(len(specs))]
