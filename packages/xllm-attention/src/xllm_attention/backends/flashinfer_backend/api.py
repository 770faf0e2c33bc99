"""Lists the FlashInfer functions and private attributes that this backend uses, and wraps the private ones.

`RELIED_ON` is compared with FlashInfer's source by a test that needs no GPU; some of it is private, because the public
methods copy from the device (`plan` given device tensors) or allocate pinned buffers of their own.
"""

from __future__ import annotations

from typing import Any, Final

RELIED_ON: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "decode.py": {
        "BatchDecodeWithPagedKVCacheWrapper.__init__": (
            "float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores", "paged_kv_indptr_buffer",
            "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer",
        ),
        "BatchDecodeWithPagedKVCacheWrapper.plan": (
            "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size",
            "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "sm_scale",
        ),
        "BatchDecodeWithPagedKVCacheWrapper.run": ("q", "paged_kv_cache", "k_scale", "v_scale", "out"),
        "fast_decode_plan": (
            "self", "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size",
            "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "sm_scale", "global_override_indptr_cpu",
        ),
    },
    "prefill.py": {
        "BatchPrefillWithPagedKVCacheWrapper.__init__": ("float_workspace_buffer", "kv_layout", "backend"),
        "BatchPrefillWithPagedKVCacheWrapper.plan": (
            "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads",
            "num_kv_heads", "head_dim_qk", "page_size", "causal", "sm_scale", "window_left", "logits_soft_cap",
            "q_data_type", "kv_data_type", "max_token_per_sequence",
        ),
        "BatchPrefillWithPagedKVCacheWrapper.run": ("q", "paged_kv_cache", "k_scale", "v_scale", "out"),
        "BatchPrefillWithRaggedKVCacheWrapper.__init__": ("float_workspace_buffer", "kv_layout", "backend"),
        "BatchPrefillWithRaggedKVCacheWrapper.plan": (
            "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "causal", "window_left",
            "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type",
        ),
        "BatchPrefillWithRaggedKVCacheWrapper.run": ("q", "k", "v", "out"),
    },
}  # fmt: skip
"""Source file -> function -> parameters that are passed to it by name or in this order."""

RELIED_ON_ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "decode.py": (
        "_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_plan_info", "_paged_kv_indptr_buf",
        "_paged_kv_last_page_len_buf",
    ),
    "prefill.py": (
        "_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_plan_info", "_qo_indptr_buf",
        "_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf", "_kv_indptr_buf",
    ),
}  # fmt: skip
"""Source file -> attributes of its wrappers that are read or replaced."""

CUDA_CORE_GROUP_SIZES: Final = frozenset({1, 2, 3, 4, 8})
"""Group sizes that the decode kernel on CUDA cores is compiled for."""

INT_WORKSPACE_BYTES: Final = 8 << 20
"""What the wrappers themselves allocate for a schedule."""


def set_workspaces(wrapper: Any, int_workspace: Any) -> None:
    """Makes a wrapper use a shared int workspace. Its own would cost 8 MiB per bucket."""
    wrapper._int_workspace_buffer = int_workspace
    wrapper._pin_memory_int_workspace_buffer = None  # one is lent for each plan


def lend_pinned(wrapper: Any, pinned: Any) -> None:
    """The pinned buffer that the wrapper's next plan writes its schedule to."""
    wrapper._pin_memory_int_workspace_buffer = pinned


def plan_info(wrapper: Any) -> tuple[int, ...]:
    """Kernel, grid and workspace offsets of the last plan: a captured run depends on them."""
    return tuple(int(number) for number in wrapper._plan_info)


def set_paged_tables(wrapper: Any, *, qo_indptr: Any, kv_indptr: Any, last_page_lens: Any) -> None:
    """Makes a planned paged prefill read these device arrays, not the copies that `plan` made of host arrays."""
    wrapper._qo_indptr_buf = qo_indptr
    wrapper._paged_kv_indptr_buf = kv_indptr
    wrapper._paged_kv_last_page_len_buf = last_page_lens


def set_ragged_tables(wrapper: Any, indptr: Any) -> None:
    """The same for a ragged prefill without prefixes, where queries and keys have the same offsets."""
    wrapper._qo_indptr_buf = indptr
    wrapper._kv_indptr_buf = indptr
