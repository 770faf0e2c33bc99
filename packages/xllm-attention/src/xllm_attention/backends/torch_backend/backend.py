"""`TorchBackend`: attention in PyTorch ops, the oracle for other backends. Owns the caches and the current plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...backend import AttentionBackend, BackendCapabilities, Phase, Step
from ...fp8_cache import FP8
from ...kv_groups import pages_of, slots_of
from .append import AppendPlan, append, plan_append
from .dense_decode import DenseDecode
from .ragged import RaggedPlan, plan_ragged, run_ragged


class TorchBackend(AttentionBackend):
    """Paged attention in PyTorch ops, for any device, head dim and group size.

    A step planned with graph=True (decode only) runs in fixed shapes and may be captured; it reads max_model_len (or
    window) keys a row, whatever the lengths. Every other step runs sequence by sequence over real tokens only.
    """

    name = "torch"
    capabilities = BackendCapabilities(
        full_graph_phases=frozenset({Phase.DECODE}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        v_head_dims=True,
        latent=True,
        sinks=True,
        kv_groups=True,
        cache_dtypes=frozenset({FP8}),
    )

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        self._caches = tuple(caches)
        self._scales = self.cache_scales
        self._plans: list[RaggedPlan | DenseDecode] = [
            RaggedPlan(spec=spec, sequences=(), num_rows=0) for spec in self.group_specs
        ]
        self._appends: dict[int, AppendPlan] = {}  # by KV cache group
        self._append_buffers: dict[int, AppendPlan] = {}  # the same, for graph steps
        self._dense: tuple[DenseDecode, ...] = ()

    def _plan_step(self, step: Step) -> None:
        for kv_group in dict.fromkeys(self.kv_group_of_group):
            plan = plan_append(slots_of(step.metadata, kv_group), self.page_size)
            if step.graph:
                plan = self._persistent_appends()[kv_group].refill(plan)
            self._appends[kv_group] = plan

    def _plan_group(self, step: Step, group: int) -> None:
        if step.graph:
            self._dense[group].fill(step, pages_of(step.metadata, self.kv_group_of_group[group]))
            self._plans[group] = self._dense[group]
        else:
            pages = pages_of(step.metadata, self.kv_group_of_group[group])
            self._plans[group] = plan_ragged(step, pages, self.group_specs[group], self.page_size, self.limits.dtype)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor | None,
    ) -> None:
        k_cache, v_cache = self._caches[layer_id]
        scales = self._scales[layer_id]
        group = self.group_of_layer[layer_id]
        append_plan = self._appends[self.kv_group_of_group[group]]
        append(append_plan, k, k_cache, 1.0 if scales is None else scales.k)
        if not self.group_specs[group].latent:
            append(append_plan, v, v_cache, 1.0 if scales is None else scales.v)
        plan = self._plans[group]
        if isinstance(plan, DenseDecode):
            plan.run(q, k_cache, v_cache, out, sinks, scales)
        else:
            run_ragged(plan, q, k_cache, v_cache, out, sinks, scales)

    def _persistent_appends(self) -> dict[int, AppendPlan]:
        """The buffers of graph steps, made at the first one, so that a host without graphs does not pay for them."""
        if not self._append_buffers:
            limits = self.limits
            # Ordinary tensors even when the first plan is made in inference mode: later ones may not be.
            with torch.inference_mode(False):
                self._append_buffers = {
                    kv_group: AppendPlan.allocate(limits.max_num_tokens, limits.device)
                    for kv_group in set(self.kv_group_of_group)
                }
                self._dense = tuple(
                    DenseDecode(
                        spec,
                        page_size=self.page_size,
                        max_num_seqs=limits.max_num_seqs,
                        max_model_len=limits.max_model_len,
                        device=limits.device,
                    )
                    for spec in self.group_specs
                )
        return self._append_buffers
