"""Writing a step's keys and values into the paged cache, as one kernel. Any strides; offsets in int64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...triton_launch import KeyedLauncher, alignment


class Append:
    """Appends the keys and values of a step to the caches; keeps its compiled kernels."""

    def __init__(self) -> None:
        self._launch = KeyedLauncher(append_kernel)

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes k, v [>= T, K, D] at slots [T] int32 of the caches [num_pages, page_size, K, D].

        Slots below 0 are skipped.
        """
        num_tokens = slots.shape[0]
        if num_tokens == 0:
            return
        _, page_size, num_kv_heads, head_dim = k_cache.shape
        strides = (*k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride())
        constants = {
            "STRIDES": strides,
            "PAGE_SIZE": page_size,
            "K": num_kv_heads,
            "D": head_dim,
            "K_PAD": triton.next_power_of_2(num_kv_heads),
            "D_PAD": triton.next_power_of_2(head_dim),
        }
        key = (*strides, page_size, num_kv_heads, head_dim, k.dtype, *alignment(k, v, k_cache, v_cache, slots))
        self._launch(key, (num_tokens, 1, 1), (k, v, k_cache, v_cache, slots), constants, {"num_warps": 4})


@triton.jit  # type: ignore[untyped-decorator]
def append_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, slots_ptr: tl.tensor,
    STRIDES: tl.constexpr, PAGE_SIZE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, K_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """One program a token. STRIDES of k, v (token, head, element) and of the caches (page, place, head, element)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE
    head = tl.arange(0, K_PAD)[:, None].to(tl.int64)
    element = tl.arange(0, D_PAD)[None, :].to(tl.int64)
    inside = (head < K) & (element < D)
    k = tl.load(k_ptr + token * STRIDES[0] + head * STRIDES[1] + element * STRIDES[2], mask=inside, other=0.0)
    v = tl.load(v_ptr + token * STRIDES[3] + head * STRIDES[4] + element * STRIDES[5], mask=inside, other=0.0)
    k_place = k_cache_ptr + page * STRIDES[6] + place * STRIDES[7] + head * STRIDES[8] + element * STRIDES[9]
    v_place = v_cache_ptr + page * STRIDES[10] + place * STRIDES[11] + head * STRIDES[12] + element * STRIDES[13]
    tl.store(k_place, k, mask=inside)
    tl.store(v_place, v, mask=inside)
