"""Appends a step's keys and values to the paged cache in one kernel. Any strides; offsets in int64.

A value that is not finite would reach rows to which its key is masked, since 0 * NaN is NaN. So a token with such a
value becomes a NaN key with value 0: rows that see the key are NaN, and masked scores are replaced, not multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...fp8_cache import CacheScales
from ...triton_launch import KeyedLauncher, alignment
from .fp8 import to_fp8
from .tile import without_bad_values


class Append:
    """Launches `append_kernel` for a step; keeps its compiled variants."""

    def __init__(self) -> None:
        self._launch = KeyedLauncher(append_kernel)

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
        v_dim: int = 0, scales: CacheScales | None = None,
    ) -> None:  # fmt: skip
        """Writes k, v [>= T, K, D] at slots [T] int32 of the caches [num_pages, page_size, K, D]; fp8 ones have scales.

        Slots below 0 are skipped. An element of v that is not finite becomes 0, and that of k NaN, also in k and v. In
        a latent layer, whose v_dim is not 0, only k is read and written. Its first v_dim elements are the value. If one
        of them is not finite, it becomes 0, and the elements after the value become NaN.
        """
        num_tokens = slots.shape[0]
        if num_tokens == 0:
            return
        _, page_size, num_kv_heads, head_dim = k_cache.shape
        strides = {
            "K_STRIDES": k.stride(),
            "V_STRIDES": v.stride(),
            "K_CACHE_STRIDES": k_cache.stride(),
            "V_CACHE_STRIDES": v_cache.stride(),
        }
        constants = {
            **strides,
            "PAGE_SIZE": page_size,
            "K": num_kv_heads,
            "D": head_dim,
            "K_PAD": triton.next_power_of_2(num_kv_heads),
            "D_PAD": triton.next_power_of_2(head_dim),
            "V_DIM": v_dim,
        }
        key = (
            *strides.values(),
            page_size,
            num_kv_heads,
            head_dim,
            v_dim,
            k.dtype,
            k_cache.dtype,
            *alignment(k, v, k_cache, v_cache, slots),
        )
        k_scale, v_scale = (None, None) if scales is None else (scales.k, scales.v)
        arguments = (k, v, k_cache, v_cache, slots, k_scale, v_scale)
        self._launch(key, (num_tokens, 1, 1), arguments, constants, {"num_warps": 4})


@triton.jit  # type: ignore[untyped-decorator]
def append_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, slots_ptr: tl.tensor,
    k_scale: tl.tensor, v_scale: tl.tensor,  # of fp8 caches; None: the caches have the dtype of k
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, K_CACHE_STRIDES: tl.constexpr, V_CACHE_STRIDES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, K_PAD: tl.constexpr, D_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Writes one token per program. Strides in elements: (token, head, dim), of caches (page, slot, head, dim)."""
    k_stride_token, k_stride_head, k_stride_dim = K_STRIDES[0], K_STRIDES[1], K_STRIDES[2]
    v_stride_token, v_stride_head, v_stride_dim = V_STRIDES[0], V_STRIDES[1], V_STRIDES[2]
    k_cache_stride_page, k_cache_stride_slot = K_CACHE_STRIDES[0], K_CACHE_STRIDES[1]
    k_cache_stride_head, k_cache_stride_dim = K_CACHE_STRIDES[2], K_CACHE_STRIDES[3]
    v_cache_stride_page, v_cache_stride_slot = V_CACHE_STRIDES[0], V_CACHE_STRIDES[1]
    v_cache_stride_head, v_cache_stride_dim = V_CACHE_STRIDES[2], V_CACHE_STRIDES[3]
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE_SIZE
    page_slot = slot % PAGE_SIZE
    head = tl.arange(0, K_PAD)[:, None].to(tl.int64)
    element = tl.arange(0, D_PAD)[None, :].to(tl.int64)
    mask = (head < K) & (element < D)
    k_source = k_ptr + token * k_stride_token + head * k_stride_head + element * k_stride_dim
    k = tl.load(k_source, mask=mask, other=0.0)
    k_target = k_cache_ptr + page * k_cache_stride_page + page_slot * k_cache_stride_slot
    k_target = k_target + head * k_cache_stride_head + element * k_cache_stride_dim
    # Prompts are attended over k and v, not over the cache, so bad elements are replaced there too.
    if V_DIM > 0:
        in_value = element < V_DIM
        bad = in_value & ((tl.abs(k.to(tl.float32)) < float("inf")) == 0)
        any_bad = tl.max(bad.to(tl.int32), 1)[:, None] > 0
        k = tl.where(bad, 0.0, tl.where(any_bad & (element >= V_DIM), float("nan"), k))
        tl.store(k_source, k, mask=mask & any_bad)
    else:
        v_source = v_ptr + token * v_stride_token + head * v_stride_head + element * v_stride_dim
        v = tl.load(v_source, mask=mask, other=0.0)
        k, v, bad = without_bad_values(k, v)
        tl.store(k_source, k, mask=mask & bad)
        tl.store(v_source, v, mask=mask & bad)
        if k_scale is not None:
            k, v = to_fp8(k, k_scale), to_fp8(v, v_scale)
    tl.store(k_target, k, mask=mask)
    if V_DIM == 0:
        v_target = v_cache_ptr + page * v_cache_stride_page + page_slot * v_cache_stride_slot
        v_target = v_target + head * v_cache_stride_head + element * v_cache_stride_dim
        tl.store(v_target, v, mask=mask)
