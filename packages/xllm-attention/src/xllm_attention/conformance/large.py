"""A check of offsets beyond 2^31 elements. Not in the table of cases, since it reserves two caches of 4 GiB."""

from __future__ import annotations

import torch

from xllm_metadata import LayerCache, build_attention_metadata

from ..limits import BackendLimits
from ..spec import AttentionSpec
from .reference import reference_attention
from .runner import TOLERANCES, BackendFactory, ConformanceError


def check_large_cache(
    factory: BackendFactory, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> None:
    """Prefills and decodes a sequence in the last two pages of a cache of more than 2^31 elements.

    The cache is never initialised, so that on a CPU only the pages that are touched take memory.

    Raises:
        ConformanceError: a wrong output, or the last slots do not hold what was written.
    """
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, scale=128**-0.5)
    page_size = 128
    num_pages = 2**31 // (page_size * spec.num_kv_heads * spec.head_dim) + 2
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    device = torch.device(device)
    cache = LayerCache(
        k=torch.empty(shape, dtype=dtype, device=device), v=torch.empty(shape, dtype=dtype, device=device)
    )
    kv_len = 2 * page_size
    limits = BackendLimits(device=device, dtype=dtype, max_num_seqs=1, max_num_tokens=kv_len, max_model_len=kv_len)
    backend = factory([spec], limits)
    backend.bind_kv_caches([cache])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((kv_len, 8, spec.head_dim), generator=generator).to(device, dtype)
    q, k, v = rows[:, :4], rows[:, 4:6], rows[:, 6:]
    table = [num_pages - 2, num_pages - 1]
    out = torch.empty_like(q)
    for new in (slice(0, kv_len - 1), slice(kv_len - 1, kv_len)):
        metadata = build_attention_metadata([new.stop - new.start], [new.stop], [table], page_size, device)
        backend.plan(metadata)
        backend.run(q[new], k[new], v[new], out[new], 0)
    reference = reference_attention(q, k, v, spec)
    error = float(((out.cpu().double() - reference).norm(dim=-1) / reference.norm(dim=-1)).nan_to_num(torch.inf).max())
    if error > TOLERANCES[dtype]:
        raise ConformanceError(f"large cache: relative error {error:.3g} exceeds {TOLERANCES[dtype]}")
    for name, tensor, values in (("k", cache.k, k), ("v", cache.v, v)):
        if tensor is None or not torch.equal(tensor[-2:].flatten(0, 1), values):
            raise ConformanceError(f"large cache: the last two pages of {name} do not hold what was written")
