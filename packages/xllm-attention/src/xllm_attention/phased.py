"""`PhasedBackend`: one attention backend made of several, one per phase. Owns no plan and no buffer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from .backend import AttentionBackend, BackendCapabilities, Phase, Step, layer_cache
from .limits import BackendLimits
from .spec import AttentionSpec


class PhasedBackend(AttentionBackend):
    """Hands every step to the backend of its phase. All share the caches.

    Args:
        name: the value of `attention_backend` that asked for it.
        by_phase: the backend of each phase, all made for the specs and limits that follow.
        specs, limits: as `AttentionBackend`.
    """

    def __init__(
        self,
        name: str,
        by_phase: Mapping[Phase, AttentionBackend],
        specs: Sequence[AttentionSpec],
        limits: BackendLimits,
    ) -> None:
        self.name = name
        self.by_phase = dict(by_phase)
        self.capabilities = BackendCapabilities(
            full_graph_phases=frozenset(
                phase for phase, backend in by_phase.items() if phase in backend.capabilities.full_graph_phases
            ),
            sinks=all(backend.capabilities.sinks for backend in by_phase.values()),
            v_head_dims=all(backend.capabilities.v_head_dims for backend in by_phase.values()),
            latent=all(backend.capabilities.latent for backend in by_phase.values()),
            kv_groups=all(backend.capabilities.kv_groups for backend in by_phase.values()),
            cache_dtypes=frozenset.intersection(*(backend.capabilities.cache_dtypes for backend in by_phase.values())),
        )
        super().__init__(specs, limits)

    @property
    def plan_layout(self) -> Hashable:
        """Also which backend was planned, and its own layout."""
        return (super().plan_layout, self._current.name, self._current.plan_layout)

    @property
    def optional_fields(self) -> frozenset[str]:
        """Those of all phases' backends."""
        return frozenset().union(*(backend.optional_fields for backend in self.by_phase.values()))

    def plans_on_host(self, phase: Phase) -> bool:
        """See `AttentionBackend.plans_on_host`: asks the backend of the phase."""
        return self.by_phase[phase].plans_on_host(phase)

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        specs = [spec for spec in self.specs if isinstance(spec, AttentionSpec)]
        layers = [layer_cache(pair, spec) for pair, spec in zip(caches, specs, strict=True)]
        for backend in dict.fromkeys(self.by_phase.values()):  # each once, though it may serve several phases
            backend.bind_kv_caches(layers)

    def _plan_step(self, step: Step) -> None:
        self._current = self.by_phase[step.phase]
        self._current.plan_checked(step)

    def _plan_group(self, step: Step, group: int) -> None:
        """Does nothing: `_plan_step` had the phase's backend plan its groups, which are the same."""

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor | None,
    ) -> None:
        self._current.run(q, k, v, out, layer_id, sinks)
