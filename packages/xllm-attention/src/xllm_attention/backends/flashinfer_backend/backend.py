"""`FlashInferBackend`: plans and runs steps with FlashInfer's kernels. Owns the buffers that all groups share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ...backend import AttentionBackend, BackendCapabilities, Phase, Step
from ...fp8_cache import FP8
from ..triton_backend.append import Append
from . import api
from .pinned import PinnedRing
from .plans import GroupPlans
from .tables import StepTables

FLOAT_WORKSPACE_BYTES = 256 << 20  # twice what FlashInfer recommends: its split prefill asks for more at many heads


class FlashInferBackend(AttentionBackend):
    """Paged attention by FlashInfer, for CUDA devices.

    Decode runs on CUDA cores or, for large groups and those they lack, on tensor cores; whole prompts run over the
    step's own keys, all other steps over the paged cache. Steps with an fp8 cache always run over the cache, so that a
    prompt's result does not depend on how it is cut into chunks. Plans read host mirrors only and copy nothing from the
    device. FlashInfer compiles a kernel when it is first used; binding the caches does that, so that no step waits.

    FlashInfer reads the NaN of an fp8 cache as a finite number. So a row that sees a key or value that is not finite
    may be finite, unlike on the other backends.

    Raises:
        ValueError: also by `bind_kv_caches`, for k and v caches of unequal strides, or whose elements are not adjacent.
    """

    name = "flashinfer"
    capabilities = BackendCapabilities(
        full_graph_phases=frozenset({Phase.DECODE}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset({64, 128, 256}),
        device_types=frozenset({"cuda"}),
        cache_dtypes=frozenset({FP8}),
        fp8_compute_capability=(8, 9),  # of the kernel that appends
    )

    @property
    def plan_layout(self) -> Hashable:
        """Also FlashInfer's own plan: kernel, grid and workspace offsets."""
        return (super().plan_layout, tuple(group.layout for group in self._group_plans))

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        for layer_id, (k, v) in enumerate(caches):
            if k.stride() != v.stride() or k.stride(3) != 1:
                raise ValueError(
                    f"k and v cache of layer {layer_id} have strides {k.stride()} and {v.stride()}; attention backend "
                    "'flashinfer' needs equal ones, and adjacent elements"
                )
        limits = self.limits
        self._caches = tuple(caches)
        self._scales = self.cache_scales
        self._append = Append()
        # Ordinary tensors even when made in inference mode: later plans may not be.
        with torch.inference_mode(False):
            self._tables = StepTables(
                max_num_seqs=limits.max_num_seqs,
                max_num_tokens=limits.max_num_tokens,
                max_num_pages=limits.max_num_pages(page_size),
                device=limits.device,
            )
            pinned = PinnedRing(2 * len(self.groups), api.INT_WORKSPACE_BYTES)
            # Zeroed: FlashInfer's kernels keep counters in it.
            workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=limits.device)
            self._group_plans = tuple(
                GroupPlans(
                    spec,
                    page_size=page_size,
                    dtype=limits.dtype,
                    tables=self._tables,
                    pinned=pinned,
                    float_workspace=workspace,
                )
                for spec in self.group_specs
            )
            for plans in self._group_plans:
                plans.prepare()

    def _plan_step(self, step: Step) -> None:
        self._tables.fill(step)
        self._slots = self._tables.slots[: step.num_tokens]
        # Query rows that belong to a sequence; in decode all do, those of KV length 0 included.
        indptr = step.metadata.qo_indptr_host
        self._num_rows = step.num_tokens if indptr is None or step.phase is Phase.DECODE else int(indptr[-1])
        self._prompts = step.phase is Phase.PREFILL

    def _plan_group(self, step: Step, group: int) -> None:
        plans = self._group_plans[group]
        if self._num_rows == 0:
            plans.plan_nothing()
        elif step.phase is Phase.DECODE:
            plans.plan_decode(step)
        elif self._prompts and not plans.fp8:
            plans.plan_ragged(step)
        else:
            plans.plan_paged(step)

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
        self._append(k, v, k_cache, v_cache, self._slots, scales=scales)
        if self._num_rows < out.shape[0]:
            out[self._num_rows :].zero_()
        if self._num_rows == 0:
            return
        wrapper = self._group_plans[self.group_of_layer[layer_id]].current
        rows = slice(0, self._num_rows)
        result = out[rows] if out.is_contiguous() else torch.empty(q[rows].shape, dtype=q.dtype, device=q.device)
        if scales is not None:
            wrapper.run(_adjacent(q[rows]), (k_cache, v_cache), k_scale=scales.k, v_scale=scales.v, out=result)
        elif self._prompts:
            wrapper.run(_adjacent(q[rows]), _adjacent(k[rows]), _adjacent(v[rows]), out=result)
        else:
            wrapper.run(_adjacent(q[rows]), (k_cache, v_cache), out=result)
        if not out.is_contiguous():
            out[rows] = result


def _adjacent(tensor: torch.Tensor) -> torch.Tensor:
    """FlashInfer accepts any strides of tokens and heads; the elements of a head must be contiguous."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
