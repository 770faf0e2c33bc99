"""`PhasedBackend`: several backends behind one interface, one of them for each step. Owns none of their work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from xllm_metadata import LayerCache

from .backend import AttentionBackend, BackendCapabilities, Phase, Step
from .limits import BackendLimits
from .spec import AttentionSpec

Choose = Callable[[Phase, int], str]
"""(phase, padded number of sequences) -> name of the backend for such a step."""


class PhasedBackend(AttentionBackend):
    """Chooses a backend for every step by its phase and bucket, never by its lengths, so that graphs stay valid.

    Args:
        name: what it is called.
        backends: the backends by name; all made for these specs and limits.
        choose: which of them serves a step.
        specs, limits: as `AttentionBackend`.
    """

    def __init__(
        self,
        name: str,
        backends: Mapping[str, AttentionBackend],
        choose: Choose,
        specs: Sequence[AttentionSpec],
        limits: BackendLimits,
    ) -> None:
        self.name = name
        self.backends = dict(backends)
        self.choose = choose
        self.capabilities = BackendCapabilities(
            full_graph_phases=frozenset(
                phase for phase in Phase if all(phase in self._of(phase, n) for n in range(1, limits.max_num_seqs + 1))
            )
        )
        super().__init__(specs, limits)

    @property
    def plan_layout(self) -> Hashable:
        """Also which backend was planned, and its own layout."""
        return (super().plan_layout, self._current.name, self._current.plan_layout)

    def plans_on_host(self, phase: Phase, num_seqs: int) -> bool:
        """See `AttentionBackend.plans_on_host`: of the backend that such a step gets."""
        return self.backends[self.choose(phase, num_seqs)].plans_on_host(phase, num_seqs)

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        layers = [LayerCache(k=k, v=v) for k, v in caches]
        for backend in self.backends.values():
            backend.bind_kv_caches(layers)

    def _plan_step(self, step: Step) -> None:
        self._current = self.backends[self.choose(step.phase, step.num_seqs)]
        self._current.plan_checked(step)

    def _plan_group(self, step: Step, group: int) -> None:
        """Done: the chosen backend has planned all its groups, which are the same."""

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int) -> None:
        self._current.run(q, k, v, out, layer_id)

    def _of(self, phase: Phase, num_seqs: int) -> frozenset[Phase]:
        return self.backends[self.choose(phase, num_seqs)].capabilities.full_graph_phases
