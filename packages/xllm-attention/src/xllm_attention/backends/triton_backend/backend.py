"""`TritonBackend`: binds caches, plans steps and launches the Triton kernels. Owns their buffers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton

from ...backend import AttentionBackend, BackendCapabilities, Phase, Step
from ...fp8_cache import FP8
from ...limits import BackendLimits
from ...spec import AttentionSpec
from ...triton_launch import KeyedLauncher, alignment
from .append import Append, append_kernel
from .attend import attend_kernel
from .combine import combine_kernel
from .workspace import WorkList, Workspace

# True when the environment variable TRITON_INTERPRET was set as the kernels were defined.
INTERPRETED = not isinstance(append_kernel, triton.JITFunction)


class TritonBackend(AttentionBackend):
    """Paged attention in Triton kernels, for CUDA devices; on a CPU in Triton's interpreter (TRITON_INTERPRET=1).

    Decode is one launch per layer: it appends the new token, splits the keys of long sequences over many programs and
    combines them. Other steps take two. Every launch has a size that depends on the bucket only, whatever the lengths:
    the work list that says which program does what is made on the device by `plan`.

    Raises:
        ValueError: also for bfloat16 on a CPU, where the interpreter's products are wrong, and for a CPU without it.
    """

    name = "triton"
    capabilities = BackendCapabilities(
        full_graph_phases=frozenset({Phase.DECODE}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        head_dims=frozenset({16, 32, 64, 80, 96, 112, 128, 192, 256}),
        device_types=frozenset({"cuda", "cpu"}),
        sinks=True,
        latent=True,
        latent_dims=frozenset({(576, 512), (288, 256), (96, 64), (64, 40), (24, 16)}),
        kv_groups=True,
        cache_dtypes=frozenset({FP8}),
        fp8_compute_capability=(8, 9),
    )

    def __init__(self, specs: Sequence[AttentionSpec], limits: BackendLimits) -> None:
        super().__init__(specs, limits)
        device, dtype = limits.device, limits.dtype
        if device.type == "cpu" and not INTERPRETED:
            raise ValueError("attention backend 'triton' runs on a CPU only in its interpreter: set TRITON_INTERPRET=1")
        if INTERPRETED and dtype is torch.bfloat16:
            raise ValueError("attention backend 'triton' cannot serve torch.bfloat16 in its interpreter")

        # Programmatic dependent launch: the next launch of a graph starts before the last one has drained.
        self._can_overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        limits = self.limits
        self._caches = tuple(caches)
        self._append, self._attend, self._combine = (
            Append(),
            KeyedLauncher(attend_kernel),
            KeyedLauncher(combine_kernel),
        )
        self._scales = self.cache_scales
        self._strides = tuple((k.stride(), v.stride()) for k, v in caches)
        # Ordinary tensors even when made in inference mode: later plans may not be.
        with torch.inference_mode(False):
            self._lists = {decode: self._work_lists(decode) for decode in (True, False)}
            self._workspace = Workspace(
                (*self._lists[True], *self._lists[False]),
                max_num_seqs=limits.max_num_seqs,
                max_num_tokens=limits.max_num_tokens,
                max_num_pages=limits.max_num_pages(page_size),
                device=limits.device,
                kv_groups=self.kv_group_of_group,
            )
        # The first work list of each KV cache group also copies its page indices.
        firsts = [self.kv_group_of_group.index(kv_group) for kv_group in self.kv_group_of_group]
        self._copies_pages = tuple(first == group for group, first in enumerate(firsts))

    def plans_on_host(self, phase: Phase) -> bool:
        """See `AttentionBackend.plans_on_host`: the work list is made on the device."""
        return False

    def _plan_step(self, step: Step) -> None:
        self._workspace.fill(step)
        self._graph = step.graph
        self._decode = step.phase is Phase.DECODE
        self._prefill = step.phase is Phase.PREFILL
        self._step_size = (step.num_tokens, step.num_seqs)
        # Query rows that belong to a sequence; in decode all do, those of KV length 0 included.
        indptr = step.metadata.qo_indptr_host
        self._num_rows = step.num_tokens if self._decode or indptr is None else int(indptr[-1])

    def _plan_group(self, step: Step, group: int) -> None:
        work = self._lists[self._decode][group]
        work.fill(step, self._workspace.pages[work.kv_group], copies_pages=self._copies_pages[group])

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
        work = self._lists[self._decode][self.group_of_layer[layer_id]]
        space, scales = self._workspace, self._scales[layer_id]
        if not self._decode:
            value_dim = work.spec.value_head_dim if work.spec.latent else 0
            self._append(k, v, k_cache, v_cache, space.slots[work.kv_group], value_dim, scales)
        if self._num_rows < out.shape[0]:
            out[self._num_rows :].zero_()
        if not self._step_size[1]:
            return
        captured = self._can_overlap and torch.cuda.is_current_stream_capturing()
        arguments = (
            q, k, v, out, k_cache, v_cache, work.items, space.pages[work.kv_group], space.partials, space.states,
            space.firsts if work.spec.latent else space.arrived,
            q if sinks is None else sinks,  # q: a layer without sinks does not read it
            *((None, None) if scales is None else (scales.k, scales.v)),
        )  # fmt: skip
        grid = (work.heads.num_blocks, work.num_programs(*self._step_size), 1)
        key, constants, options = self._variant(work, layer_id, (q, k, v, out), captured)
        self._attend(key, grid, arguments, constants, options)
        if work.spec.latent:
            self._combine_chunks(work, out, captured)
        if self._can_overlap and self._graph and not captured:
            # A capture launches the PDL variant. It is compiled here, since a capture must not compile.
            key, constants, options = self._variant(work, layer_id, (q, k, v, out), True)
            self._attend.prepare(key, arguments, constants, options)
            if work.spec.latent:
                self._combine_chunks(work, out, True, prepare=True)

    def _variant(
        self, work: WorkList, layer_id: int, rows: tuple[torch.Tensor, ...], pdl: bool
    ) -> tuple[Hashable, dict[str, Any], dict[str, Any]]:
        """Key, constants and options of the attention kernel for q, k, v, out."""
        caches, group = self._caches[layer_id], self.group_of_layer[layer_id]
        spec, heads, tiles = work.spec, work.heads, work.tiles
        # Whole prompts need no cache. From an fp8 cache they read the rounded keys, as later steps do, so that a
        # prompt's result does not depend on how it is cut into chunks.
        paged = not self._prefill or spec.cache_dtype is not None
        q, k, v, out = rows
        k_cache_strides, v_cache_strides = self._strides[layer_id]
        constants = {
            "Q_STRIDES": q.stride(),
            "K_NEW_STRIDES": k.stride(),
            "V_NEW_STRIDES": v.stride(),
            "OUT_STRIDES": out.stride(),
            "K_CACHE_STRIDES": k_cache_strides,
            "V_CACHE_STRIDES": v_cache_strides,
            "scale": spec.scale,
            "soft_cap": spec.logits_soft_cap,
            "G": heads.block_heads,
            "K": heads.num_blocks,
            "D": heads.dim,
            "D_PAD": triton.next_power_of_2(heads.dim),
            "PAGE_SIZE": caches[0].shape[1],
            "WINDOW": spec.sliding_window,
            "CAP": spec.logits_soft_cap > 0,
            "SINKS": spec.sinks,
            "REST": heads.rest_dim,
            "REST_PAD": max(16, triton.next_power_of_2(heads.rest_dim)),
            "BLOCKS": heads.sharers,
            "DECODE": self._decode,
            "PAGED": paged,
            "IEEE": self.limits.dtype is torch.float32,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "R": tiles.kept_rows,
            "BLOCK_C": tiles.block_c,
            "PDL": pdl,
        }
        options = {
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            "maxnreg": tiles.max_registers,
            "launch_pdl": pdl,
        }
        strides = (q.stride(), k.stride(), v.stride(), out.stride(), k_cache_strides, v_cache_strides)
        return (group, self._decode, paged, pdl, strides, alignment(*rows, *caches)), constants, options

    def _combine_chunks(self, work: WorkList, out: torch.Tensor, pdl: bool, *, prepare: bool = False) -> None:
        """Launches the kernel that merges the chunks of a latent layer's tiles, or only compiles it."""
        heads, tiles, space = work.heads, work.tiles, self._workspace
        d_pad = triton.next_power_of_2(heads.dim)
        block_rows = max(1, min(tiles.kept_rows, 1024 // d_pad))
        constants = {
            "OUT_STRIDES": out.stride(),
            "G": heads.block_heads,
            "K": heads.num_blocks,
            "D": heads.dim,
            "D_PAD": d_pad,
            "DECODE": self._decode,
            "BLOCK_M": tiles.block_m,
            "R": tiles.kept_rows,
            "ROWS": block_rows,
            "BLOCK_C": tiles.block_c,
            "PDL": pdl,
        }
        key = (*constants.values(), out.dtype, *alignment(out))
        arguments = (out, work.items, space.firsts, space.partials, space.states)
        options = {"num_warps": 4, "launch_pdl": pdl}
        if prepare:
            self._combine.prepare(key, arguments, constants, options)
            return
        num_tiles = self._step_size[1] if self._decode else work.num_partials(self._step_size[1])
        grid = (heads.num_blocks, num_tiles, tiles.kept_rows // block_rows)
        self._combine(key, grid, arguments, constants, options)

    def _work_lists(self, decode: bool) -> tuple[WorkList, ...]:
        limits = self.limits
        num_processors = 4  # of the interpreter: enough for small cases to be split
        if limits.device.type == "cuda":
            num_processors = torch.cuda.get_device_properties(limits.device).multi_processor_count
        return tuple(
            WorkList.allocate(
                spec,
                kv_group=kv_group,
                dtype=limits.dtype,
                decode=decode,
                max_num_seqs=limits.max_num_seqs,
                max_num_tokens=limits.max_num_tokens,
                num_processors=num_processors,
                interpreted=INTERPRETED,
                device=limits.device,
            )
            for spec, kv_group in zip(self.group_specs, self.kv_group_of_group, strict=True)
        )
