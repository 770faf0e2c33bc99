"""Writing a step's keys and values into the paged cache, as one kernel. Any strides; offsets in int64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def append(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes k, v [>= T, K, D] at slots [T] int32 of caches [num_blocks, page_size, K, D]; slots < 0 are skipped."""
    num_tokens = slots.shape[0]
    if num_tokens == 0:
        return
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    append_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slots,
        *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(),
        PAGE_SIZE=page_size, K=num_kv_heads, D=head_dim,
        K_PAD=triton.next_power_of_2(num_kv_heads), D_PAD=triton.next_power_of_2(head_dim),
        num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def append_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, slots_ptr: tl.tensor,
    k_st: tl.tensor, k_sh: tl.tensor, k_sd: tl.tensor, v_st: tl.tensor, v_sh: tl.tensor, v_sd: tl.tensor,
    kc_sp: tl.tensor, kc_st: tl.tensor, kc_sh: tl.tensor, kc_sd: tl.tensor,
    vc_sp: tl.tensor, vc_st: tl.tensor, vc_sh: tl.tensor, vc_sd: tl.tensor,
    PAGE_SIZE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, K_PAD: tl.constexpr, D_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """One program a token. Strides: `_st` token (or place in the page), `_sh` head, `_sd` element, `_sp` page."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE
    head = tl.arange(0, K_PAD)[:, None].to(tl.int64)
    element = tl.arange(0, D_PAD)[None, :]
    inside = (head < K) & (element < D)
    k = tl.load(k_ptr + token * k_st + head * k_sh + element * k_sd, mask=inside, other=0.0)
    v = tl.load(v_ptr + token * v_st + head * v_sh + element * v_sd, mask=inside, other=0.0)
    tl.store(k_cache_ptr + page * kc_sp + place * kc_st + head * kc_sh + element * kc_sd, k, mask=inside)
    tl.store(v_cache_ptr + page * vc_sp + place * vc_st + head * vc_sh + element * vc_sd, v, mask=inside)
