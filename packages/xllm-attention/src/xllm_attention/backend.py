"""`AttentionBackend`: the base class of attention backends, between the attention op and the kernels.

Owns the order of calls (bind, plan, run), the checks that hold for every backend, the attention groups (layers of equal
spec) and the plan counts. Subclasses plan and run the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, final

import torch

from xllm_metadata import AttentionMetadata, LayerCache, check_step

from .binding import check_caches
from .fp8_cache import CacheScales
from .kv_groups import GROUP_FIELDS, kv_groups
from .limits import BackendLimits
from .spec import AttentionSpec, LayerSpec


class Phase(Enum):
    """Phase of a step: the flags is_prefill and is_chunked_prefill of the metadata as one value."""

    PREFILL = "prefill"  # whole prompts, no prefix
    CHUNKED = "chunked"  # chunks, prefixes, mixed batches, several tokens per sequence
    DECODE = "decode"  # one token per sequence

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> Phase:
        """The phase of a step. Raises `ValueError` when both flags are set."""
        if metadata.is_prefill and metadata.is_chunked_prefill:
            raise ValueError("is_prefill and is_chunked_prefill are both True; at most one may be")
        if metadata.is_prefill:
            return cls.PREFILL
        return cls.CHUNKED if metadata.is_chunked_prefill else cls.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCapabilities:
    """What a backend supports. None means no restriction.

    In a full graph the metadata's optional fields are None, except those of `AttentionBackend.optional_fields`.
    """

    full_graph_phases: frozenset[Phase] = frozenset()  # phases whose run() may be captured after plan(graph=True)
    dtypes: frozenset[torch.dtype] | None = None
    head_dims: frozenset[int] | None = None
    group_sizes: frozenset[int] | None = None
    device_types: frozenset[str] | None = None
    v_head_dims: bool = False  # value heads of another size than key heads
    latent: bool = False  # layers whose values are part of their keys
    latent_dims: frozenset[tuple[int, int]] | None = None  # (head_dim, v_head_dim) of these layers
    sinks: bool = False  # serves layers with attention sinks
    kv_groups: bool = False  # page tables per KV cache group; never reads a freed page's content
    cache_dtypes: frozenset[torch.dtype] = frozenset()  # of caches, besides the queries' dtype
    fp8_compute_capability: tuple[int, int] = (0, 0)  # of the least CUDA device that fp8 caches are served on

    def refusal(self, spec: AttentionSpec, limits: BackendLimits) -> str | None:
        """Why the combination cannot be served, as `thing value; served are ...`; None when it can."""
        if spec.sinks and not self.sinks:
            return "attention sinks; served are layers without them"
        if limits.kv_groups and spec.sliding_window and not self.kv_groups:
            return "page tables per KV cache group; served is one table for all layers"
        if spec.latent and not self.latent:
            return "latent keys; served are layers with keys and values"
        dims = (spec.head_dim, spec.value_head_dim)
        if spec.latent and self.latent_dims is not None and dims not in self.latent_dims:
            return f"latent head_dim and v_head_dim {dims}; served are {sorted(self.latent_dims)}"
        if spec.v_head_dim and not spec.latent and not self.v_head_dims:
            return f"v_head_dim {spec.v_head_dim}; served is that of the keys, {spec.head_dim}"
        if spec.cache_dtype is not None and (refusal := self._cache_refusal(spec, spec.cache_dtype, limits)):
            return refusal
        for thing, value, served in (
            ("dtype", limits.dtype, self.dtypes),
            ("head_dim", spec.head_dim, None if spec.latent else self.head_dims),
            ("group size", spec.group_size, self.group_sizes),
            ("device", limits.device.type, self.device_types),
        ):
            if served is not None and value not in served:
                listed = sorted(served, key=lambda one: (one if isinstance(one, int) else 0, str(one)))
                return f"{thing} {value}; served are {listed}"
        return None

    def _cache_refusal(self, spec: AttentionSpec, dtype: torch.dtype, limits: BackendLimits) -> str | None:
        if dtype not in self.cache_dtypes:
            listed = sorted(map(str, self.cache_dtypes)) or "those of the queries' dtype"
            return f"a cache of {dtype}; served are {listed}"
        if spec.latent:
            return f"a cache of {dtype} with latent keys; served are layers with keys and values"
        if limits.device.type == "cuda":
            capability = torch.cuda.get_device_capability(limits.device)
            if capability < self.fp8_compute_capability:
                found, least = (".".join(map(str, one)) for one in (capability, self.fp8_compute_capability))
                return f"a cache of {dtype} on compute capability {found}; served are {least} and later"
        return None


class Step(NamedTuple):  # a named tuple costs the host less per step than a dataclass
    """One step, as the planning hooks get it. Valid during one `plan` call: the caller owns the metadata's memory."""

    metadata: AttentionMetadata
    phase: Phase
    graph: bool
    num_tokens: int  # T, rows of slot_mapping, padding included
    num_seqs: int  # B, padding included


def layer_cache(pair: tuple[torch.Tensor, torch.Tensor], spec: AttentionSpec) -> LayerCache:
    """The cache that `kv_pair` took apart, for a backend that delegates."""
    k, v = pair
    return LayerCache(k=k) if spec.latent else LayerCache(k=k, v=v)


def kv_pair(cache: LayerCache, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The (k, v) tensors of an attention layer's checked cache; in a latent layer v is a view of k."""
    assert cache.k is not None  # checked at binding
    v = cache.k[..., : spec.value_head_dim] if spec.latent else cache.v
    assert v is not None
    return cache.k, v


class AttentionBackend(ABC):
    """Attention over paged KV caches [num_pages, page_size, num_kv_heads, head dim] for all layers of a model.

    `bind_kv_caches` once, then for every step `plan` once and `run` once per layer. Subclasses fill the four hooks
    `_bind`, `_plan_step`, `_plan_group` and `_run`, and set `name` and `capabilities`.

    Args:
        specs: one per layer; the index is the layer_id.
        limits: device, dtype and the largest step.

    Raises:
        ValueError: no attention layer, or a spec, device or dtype that the backend cannot serve.
    """

    name: str
    capabilities: BackendCapabilities
    runs_state_layers: ClassVar[bool] = False  # `HybridBackend` adds them to any backend

    def __init__(self, specs: Sequence[LayerSpec], limits: BackendLimits) -> None:
        self.specs = tuple(specs)
        self.limits = limits
        layers_of: dict[AttentionSpec, list[int]] = {}
        for layer_id, spec in enumerate(self.specs):
            if isinstance(spec, AttentionSpec):
                layers_of.setdefault(spec, []).append(layer_id)
            elif not self.runs_state_layers:
                raise ValueError(f"attention backend {self.name!r} cannot serve layer {layer_id}: it has no attention")
        if not layers_of:
            raise ValueError("no spec is that of an attention layer; a backend needs at least one")
        for spec, layers in layers_of.items():
            if refusal := self.capabilities.refusal(spec, limits):
                raise ValueError(f"attention backend {self.name!r} cannot serve layer {layers[0]}: {refusal}")
        self.group_specs = tuple(layers_of)
        self.groups = tuple(tuple(layers) for layers in layers_of.values())
        group_of = {layer_id: group for group, layers in enumerate(self.groups) for layer_id in layers}
        self.group_of_layer = tuple(group_of.get(layer_id, -1) for layer_id in range(len(self.specs)))
        self.attention_layers = tuple(sorted(group_of))
        self.kv_group_of_layer = kv_groups(self.specs) if limits.kv_groups else (0,) * len(self.specs)
        # By attention group: its layers have equal windows, and so one KV cache group.
        self.kv_group_of_group = tuple(self.kv_group_of_layer[layers[0]] for layers in self.groups)
        self.num_group_tables = max(self.kv_group_of_layer)
        self._plan_counts = [0] * len(self.groups)
        self._page_size: int | None = None  # of the bound caches
        self._cache_device = limits.device  # with its index, once caches are bound
        self._num_tokens: int | None = None  # of the planned step
        self._layout: Hashable = None

    @property
    def page_size(self) -> int:
        """Tokens per page of the bound caches.

        Raises:
            RuntimeError: no cache is bound.
        """
        if self._page_size is None:
            raise RuntimeError("page_size was read before bind_kv_caches")
        return self._page_size

    @property
    def cache_scales(self) -> tuple[CacheScales | None, ...]:
        """For each attention layer, the scales of its fp8 cache; None where the cache has the queries' dtype.

        Their numbers may be set after the caches are bound, when the model's weights are loaded.
        """
        specs = (self.specs[layer_id] for layer_id in self.attention_layers)
        return tuple(spec.cache_scales for spec in specs if isinstance(spec, AttentionSpec))

    @property
    def optional_fields(self) -> frozenset[str]:
        """Optional fields of the metadata that the backend reads, so that a full graph needs buffers for them."""
        return GROUP_FIELDS if self.num_group_tables else frozenset()

    @property
    def plan_counts(self) -> tuple[int, ...]:
        """Plans made so far, one number per group of `groups`."""
        return tuple(self._plan_counts)

    @property
    def plan_layout(self) -> Hashable:
        """Everything in the current plan that a captured `run` depends on, apart from buffers at fixed addresses.

        A captured graph serves every plan(graph=True) of an equal layout. The base class gives the phase and the padded
        sizes. A subclass whose plan picks kernels, grids or workspace offsets by the step's lengths adds those.
        """
        return self._layout

    def plans_on_host(self, phase: Phase) -> bool:
        """Whether `plan(graph=True)` of a step of this phase reads values of the metadata's host mirrors.

        If it reads only their sizes, a runner may fill them while the step runs.
        """
        return True

    @final
    def bind_kv_caches(self, caches: Sequence[LayerCache]) -> None:
        """Binds the caches, one per layer, with the tensors of its `cache_specs`. The caller owns their memory.

        Any strides are accepted if no two elements overlap. Discards the current plan.

        Raises:
            ValueError: wrong number, shape, dtype, device or strides, unequal page sizes, unequal num_pages in a KV
                cache group, or a cache tensor that the layer does not need.
        """
        page_size = check_caches(caches, self.specs, self.limits, self.kv_group_of_layer)
        self._num_tokens = self._page_size = None
        layers = list(zip(caches, self.specs, strict=True))
        self._bind([kv_pair(cache, spec) for cache, spec in layers if isinstance(spec, AttentionSpec)], page_size)
        states = {i: cache for i, (cache, spec) in enumerate(layers) if not isinstance(spec, AttentionSpec)}
        if states:
            self._bind_states(states)
        self._page_size = page_size
        self._cache_device = next(tensor.device for cache in caches for _, tensor in cache.items())

    @final
    def check_step(self, metadata: AttentionMetadata) -> None:
        """Checks a step's devices and page tables, see `xllm_metadata.check_step`. Never waits for the device.

        `plan` calls it, except for a full graph: there the runner calls it before it pads the step.

        Raises:
            RuntimeError: no cache is bound.
            ValueError: names the field, its value and the limit.
        """
        check_step(metadata, self.page_size, self._cache_device, self.num_group_tables)

    @final
    def plan(self, metadata: AttentionMetadata, *, graph: bool = False) -> None:
        """Plans one step: one plan per attention group, which all its layers reuse. Never waits for the device.

        Args:
            metadata: of the step; read during this call only.
            graph: plan for a full graph: fill persistent buffers whose addresses depend only on the bucket (the padded
                number of sequences), so that a captured `run` stays valid.

        Raises:
            RuntimeError: no cache is bound.
            ValueError: a step beyond the limits, contradictory metadata, page tables that do not fit the KV lengths and
                the caches' page size, a field on another device, or a phase that cannot be captured.
        """
        if self._page_size is None:
            raise RuntimeError("plan was called before bind_kv_caches")
        self._num_tokens = None  # if this plan fails, `run` must not use the previous one
        step = self._step(metadata, graph)
        if not graph:  # the host mirrors of a padded step may be filled after the plan
            check_step(metadata, self._page_size, self._cache_device, self.num_group_tables)
        self.plan_checked(step)

    @final
    def plan_checked(self, step: Step) -> None:
        """Plans a step that a backend of equal limits has checked. For backends that delegate: `PhasedBackend`."""
        self._num_tokens = None
        self._plan_step(step)
        for group in range(len(self.groups)):
            self._plan_group(step, group)
            self._plan_counts[group] += 1
        self._num_tokens = step.num_tokens
        self._layout = (step.phase.value, step.num_tokens, step.num_seqs)

    @final
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Appends k, v at the step's slots (those below 0 are skipped), attends, and writes all of `out`.

        T tokens, H heads, K kv heads, D head dim, V value head dim. Only launches work; after `plan(graph=True)` it may
        be captured.

        Args:
            q: [T, H, D], any strides. T may exceed the planned step's tokens: the rest is padding.
            k: [T, K, D], any strides. A token that is NaN or infinite may be overwritten, and so in v.
            v: [T, K, V], any strides. Neither read nor appended in a latent layer, whose values are part of k.
            out: [T, H, V]. Rows that belong to no live token, and those of KV length 0, get 0. Rows that see a key or
                value that is not finite are not finite; other rows are as without it.
            layer_id: the layer.
            sinks: contiguous [H] in q's dtype if the layer's spec has sinks, else None. Only `Attention` checks it.

        Raises:
            RuntimeError: no step is planned.
            ValueError: fewer rows than the step has tokens.
        """
        if self._num_tokens is None:
            raise RuntimeError("run was called before plan: every step needs its plan(metadata)")
        if q.shape[0] < self._num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows; the planned step has {self._num_tokens} tokens")
        self._run(q, k, v, out, layer_id, sinks)

    @final
    def run_state(self, inputs: Sequence[torch.Tensor], out: torch.Tensor, layer_id: int) -> None:
        """Runs a layer with state, see `StateSpec.run`. Only launches work; may be captured, as `run`.

        Raises:
            RuntimeError: no step is planned.
            ValueError: fewer rows than the step has tokens, or a layer without state.
        """
        if self._num_tokens is None:
            raise RuntimeError("run_state was called before plan: every step needs its plan(metadata)")
        if out.shape[0] < self._num_tokens:
            raise ValueError(f"out has {out.shape[0]} rows; the planned step has {self._num_tokens} tokens")
        self._run_state(inputs, out, layer_id)

    def _run_state(self, inputs: Sequence[torch.Tensor], out: torch.Tensor, layer_id: int) -> None:
        raise ValueError(f"attention backend {self.name!r} runs no layers with state, such as layer {layer_id}")

    def _bind_states(self, caches: Mapping[int, LayerCache]) -> None:
        """Takes the checked caches of the layers with state, by layer_id. Only called if there are some."""
        raise NotImplementedError(f"attention backend {self.name!r} has no layers with state")

    @abstractmethod
    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        """Takes the checked (k, v) caches, one pair per attention layer. In a latent layer v is a view of k."""

    @abstractmethod
    def _plan_step(self, step: Step) -> None:
        """Plans what all groups share, such as the slots to write. Called before `_plan_group`."""

    @abstractmethod
    def _plan_group(self, step: Step, group: int) -> None:
        """Plans the step for the layers of `groups[group]`, whose spec is `group_specs[group]`."""

    @abstractmethod
    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor | None,
    ) -> None:
        """`run` after its checks."""

    def _step(self, metadata: AttentionMetadata, graph: bool) -> Step:
        phase, limits = Phase.of(metadata), self.limits
        num_tokens = metadata.slot_mapping.shape[0]
        num_seqs = metadata.kv_seq_lens_host.shape[0] - 1
        if num_seqs > limits.max_num_seqs:
            raise ValueError(f"number of sequences {num_seqs} exceeds max_num_seqs {limits.max_num_seqs}")
        if num_tokens > limits.max_num_tokens:
            raise ValueError(f"number of tokens {num_tokens} exceeds max_num_tokens {limits.max_num_tokens}")
        if metadata.max_seq_len > limits.max_model_len:
            raise ValueError(f"max_seq_len {metadata.max_seq_len} exceeds max_model_len {limits.max_model_len}")
        if phase is Phase.DECODE and num_tokens != num_seqs:
            raise ValueError(f"a decode step has one token per sequence: {num_tokens} tokens, {num_seqs} sequences")
        if phase is not Phase.DECODE and (metadata.qo_indptr is None or metadata.qo_indptr_host is None):
            raise ValueError(f"qo_indptr or qo_indptr_host is None; a {phase.value} step must have both")
        if graph and phase not in self.capabilities.full_graph_phases:
            raise ValueError(
                f"attention backend {self.name!r} cannot run a {phase.value} step in a full graph; it can for "
                f"{sorted(p.value for p in self.capabilities.full_graph_phases)}"
            )
        return Step(metadata=metadata, phase=phase, graph=graph, num_tokens=num_tokens, num_seqs=num_seqs)
