"""Plans of one attention group: FlashInfer's wrappers for decode, whole prompts and everything else.

Owns the wrappers and the group's schedule workspace; buffers that groups share come from the backend.
"""

from __future__ import annotations

from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

from ...backend import Step
from ...spec import AttentionSpec
from . import api
from .pinned import PinnedRing
from .tables import StepTables


class GroupPlans:
    """FlashInfer's wrappers for the layers of one spec.

    Args:
        spec: of the group.
        page_size: tokens a page.
        dtype: of queries, and of caches that are not fp8.
        tables: the step's index arrays on the device, filled before each plan.
        pinned: buffers for schedules.
        float_workspace: partial results, shared by all groups: their layers run one after the other.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        page_size: int,
        dtype: torch.dtype,
        tables: StepTables,
        pinned: PinnedRing,
        float_workspace: torch.Tensor,
    ) -> None:
        self._spec = spec
        self.fp8 = spec.cache_dtype is not None  # then no step runs over its own keys
        self._page_size = page_size
        self._tables = tables
        self._pinned = pinned
        self._float_workspace = float_workspace
        self._shape: dict[str, Any] = {"num_qo_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
        self._formula: dict[str, Any] = {
            "sm_scale": spec.scale,
            "window_left": spec.sliding_window - 1,  # -1: no window
            "logits_soft_cap": spec.logits_soft_cap,
            "q_data_type": dtype,
            "kv_data_type": spec.cache_dtype or dtype,
        }
        # A schedule stays in use while the layers of other groups run, so each group has its own.
        self._int_workspace = torch.zeros(api.INT_WORKSPACE_BYTES, dtype=torch.uint8, device=float_workspace.device)
        self._decode: dict[int, Any] = {}  # padded number of sequences -> wrapper
        self._paged = self._prefill(BatchPrefillWithPagedKVCacheWrapper)
        self._ragged = self._prefill(BatchPrefillWithRaggedKVCacheWrapper)
        self.current: Any = None

    def prepare(self) -> None:
        """Makes FlashInfer compile and load the kernels of all phases, by planning a step of one token for each."""
        indptr, one = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        step = {**self._shape, **self._formula}
        decode = self._decode_wrapper(1)
        paged = {"head_dim": self._spec.head_dim, "page_size": self._page_size}
        prefill: tuple[Any, dict[str, Any]] = (
            (
                self._paged,
                {
                    "qo_indptr": indptr,
                    "paged_kv_indptr": indptr,
                    "paged_kv_indices": self._tables.pages[:1],
                    "paged_kv_last_page_len": one,
                    "head_dim_qk": self._spec.head_dim,
                    "page_size": self._page_size,
                },
            )
            if self.fp8
            else (self._ragged, {"qo_indptr": indptr, "kv_indptr": indptr, "head_dim_qk": self._spec.head_dim})
        )
        for wrapper, arguments in (
            (decode, {"indptr": indptr, "indices": self._tables.pages[:1], "last_page_len": one, **paged}),
            prefill,
        ):
            self._lend(wrapper)
            wrapper.plan(**arguments, **step)
            self._pinned.taken()

    @property
    def layout(self) -> tuple[int, ...]:
        """What a captured run of the current plan depends on."""
        return () if self.current is None else api.plan_info(self.current)

    def plan_nothing(self) -> None:
        """A step without live tokens."""
        self.current = None

    def plan_decode(self, step: Step) -> None:
        """Plans from the host mirrors; FlashInfer's schedule keeps its layout for each number of sequences."""
        metadata, tables, num_seqs = step.metadata, self._tables, step.num_seqs
        wrapper = self._decode.get(num_seqs)
        arguments = {
            "indices": tables.pages,
            "last_page_len": metadata.paged_kv_last_page_len_host,
            "head_dim": self._spec.head_dim,
            "page_size": self._page_size,
            **self._shape,
            **self._formula,
        }
        if wrapper is not None:
            self._lend(wrapper)
            # It copies from the device what is not given on the host.
            fast_decode_plan(
                wrapper,
                indptr=tables.kv_indptr[: num_seqs + 1],
                global_override_indptr_cpu=metadata.paged_kv_indptr_host,
                **arguments,
            )
        else:
            wrapper = self._decode[num_seqs] = self._decode_wrapper(num_seqs)
            self._lend(wrapper)
            wrapper.plan(indptr=metadata.paged_kv_indptr_host, **arguments)
            # It has copied them from the host; from here on the buffers are filled on the device only.
            tables.fill(step)
        self._pinned.taken()
        self.current = wrapper

    def plan_paged(self, step: Step) -> None:
        """Plans chunks, prefixes and mixed batches over the paged cache."""
        metadata, tables, num_seqs = step.metadata, self._tables, step.num_seqs
        self._lend(self._paged)
        self._paged.plan(
            qo_indptr=metadata.qo_indptr_host,
            paged_kv_indptr=metadata.paged_kv_indptr_host,
            paged_kv_indices=tables.pages,
            paged_kv_last_page_len=metadata.paged_kv_last_page_len_host,
            head_dim_qk=self._spec.head_dim,
            page_size=self._page_size,
            causal=True,
            max_token_per_sequence=metadata.max_query_len,  # else plan looks for it with Python's max
            **self._shape,
            **self._formula,
        )
        self._pinned.taken()
        api.set_paged_tables(
            self._paged,
            qo_indptr=tables.qo_indptr[: num_seqs + 1],
            kv_indptr=tables.kv_indptr[: num_seqs + 1],
            last_page_lens=tables.last_page_lens[:num_seqs],
        )
        self.current = self._paged

    def plan_ragged(self, step: Step) -> None:
        """Plans whole prompts, whose keys and values are the step's own."""
        self._lend(self._ragged)
        self._ragged.plan(
            qo_indptr=step.metadata.qo_indptr_host,
            kv_indptr=step.metadata.qo_indptr_host,
            head_dim_qk=self._spec.head_dim,
            causal=True,
            **self._shape,
            **self._formula,
        )
        self._pinned.taken()
        api.set_ragged_tables(self._ragged, self._tables.qo_indptr[: step.num_seqs + 1])
        self.current = self._ragged

    def _lend(self, wrapper: Any) -> None:
        api.lend_pinned(wrapper, self._pinned.take())

    def _decode_wrapper(self, num_seqs: int) -> Any:
        tables = self._tables
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores(self._spec.group_size, num_seqs),
            paged_kv_indptr_buffer=tables.kv_indptr[: num_seqs + 1],
            paged_kv_indices_buffer=tables.pages,
            paged_kv_last_page_len_buffer=tables.last_page_lens[:num_seqs],
        )
        api.set_workspaces(wrapper, self._int_workspace)
        return wrapper

    def _prefill(self, wrapper_class: Any) -> Any:
        wrapper = wrapper_class(self._float_workspace, "NHD", backend="fa2")
        api.set_workspaces(wrapper, self._int_workspace)
        return wrapper


def use_tensor_cores(group_size: int, num_seqs: int) -> bool:
    """Whether decode uses tensor cores: for large groups and batches, and group sizes without a CUDA-core kernel.

    From 32 sequences on, long contexts gain more (a fifth) than short ones lose. Below 32, CUDA cores are as fast or
    faster.
    """
    return group_size not in api.CUDA_CORE_GROUP_SIZES or group_size > 4 or num_seqs >= 32
