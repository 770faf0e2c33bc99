"""`HybridBackend`: the backend of a model that has layers with state. Owns the state slots of the planned step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import torch

from xllm_metadata import LayerCache

from .backend import AttentionBackend, Phase, Step, layer_cache
from .limits import BackendLimits
from .spec import AttentionSpec, LayerSpec
from .state import StateSpec, StateStep

_STATE_FIELDS: Final = frozenset({"linear_state_indices", "linear_state_write_indices", "has_initial_state"})


class HybridBackend(AttentionBackend):
    """Runs attention layers by another backend, and layers with state by their specs.

    Args:
        specs: of all layers.
        limits: as `AttentionBackend`.
        attention: the backend of the attention layers alone, in their order.

    Raises:
        ValueError: no attention layer.
    """

    runs_state_layers = True

    def __init__(self, specs: Sequence[LayerSpec], limits: BackendLimits, attention: AttentionBackend) -> None:
        self.name = attention.name
        self.capabilities = attention.capabilities
        super().__init__(specs, limits)
        self._attention = attention
        self._index = {layer_id: index for index, layer_id in enumerate(self.attention_layers)}
        self._states: Mapping[int, LayerCache] = {}
        self._state_step: StateStep | None = None
        # Of steps in a full graph, which may have no write slots of their own. An ordinary tensor even when made in
        # inference mode: later plans may not be.
        with torch.inference_mode(False):
            self._write_slots = torch.full((limits.max_num_seqs,), -1, dtype=torch.int32, device=limits.device)

    @property
    def optional_fields(self) -> frozenset[str]:
        """Also the state slots."""
        return self._attention.optional_fields | _STATE_FIELDS

    @property
    def plan_layout(self) -> Hashable:
        """Also the layout of the attention layers' backend."""
        return (super().plan_layout, self._attention.plan_layout)

    def plans_on_host(self, phase: Phase) -> bool:
        """See `AttentionBackend.plans_on_host`: asks the attention layers' backend."""
        return self._attention.plans_on_host(phase)

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        specs = [self.specs[layer_id] for layer_id in self.attention_layers]
        self._attention.bind_kv_caches(
            [
                layer_cache(pair, spec)
                for pair, spec in zip(caches, specs, strict=True)
                if isinstance(spec, AttentionSpec)
            ]
        )

    def _bind_states(self, caches: Mapping[int, LayerCache]) -> None:
        self._states = dict(caches)

    def _plan_step(self, step: Step) -> None:
        metadata, decode = step.metadata, step.phase is Phase.DECODE
        read, initial = metadata.linear_state_indices, metadata.has_initial_state
        if read is None or initial is None:
            absent = "linear_state_indices" if read is None else "has_initial_state"
            raise ValueError(f"{absent} is None; every step of a model with state layers must have it")
        write = metadata.linear_state_write_indices
        if write is None:
            write = read
        if step.graph:
            write = self._write_slots[: step.num_seqs].copy_(write, non_blocking=True)
        bounds: tuple[int, ...] = ()
        if not decode:
            assert metadata.qo_indptr_host is not None  # the base class has checked it
            bounds = tuple(metadata.qo_indptr_host.tolist())
        self._state_step = StateStep(decode, read, write, initial, bounds)
        self._attention.plan_checked(step)

    def _plan_group(self, step: Step, group: int) -> None:
        """Does nothing: `_plan_step` had the attention layers' backend plan its groups, which are the same."""

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor | None,
    ) -> None:
        self._attention.run(q, k, v, out, self._index[layer_id], sinks)

    def _run_state(self, inputs: Sequence[torch.Tensor], out: torch.Tensor, layer_id: int) -> None:
        spec, step = self.specs[layer_id], self._state_step
        if not isinstance(spec, StateSpec) or step is None:
            raise ValueError(f"layer {layer_id} has no state: its spec is {spec}")
        spec.run(step, self._states[layer_id], inputs, out)
