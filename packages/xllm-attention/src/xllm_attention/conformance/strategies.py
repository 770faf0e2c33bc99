"""Random conformance cases for hypothesis, which must be installed. Owns what is drawn; `run_case` checks it."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from .case import EMPTY, CacheLayout, Case


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    graph: bool = False,
    v_head_dims: bool = False,
    latent: bool = False,
    kv_groups: bool = False,
    fp8: bool = False,
) -> Case:
    """Draws a case of up to 5 sequences and 3 steps: any phases in any order, or decode steps only for a graph.

    v_head_dims, latent, kv_groups, fp8: as the backend's capabilities; some of the cases then have such layers,
    tables or caches.
    """
    prefix_lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    seqs = range(len(prefix_lens))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        batch = draw(st.lists(st.sampled_from(seqs), unique=True, max_size=len(prefix_lens)))
        decode = graph or draw(st.booleans())
        step = [(seq, 1 if decode else draw(st.integers(0, 20))) for seq in batch]
        if decode:
            for index in draw(st.lists(st.integers(0, len(step)), max_size=2)):
                step.insert(index, (EMPTY, 1))
        steps.append(tuple(step))
    largest = max(sum(n for _, n in step) for step in steps)
    padding = draw(st.integers(0, 5))
    head_dim = draw(st.sampled_from((16, 64, 80)))
    is_latent = latent and draw(st.booleans())
    v_head_dim = draw(st.sampled_from((0, 8, 16, *(() if is_latent else (96,))))) if is_latent or v_head_dims else 0
    return Case(
        name="random",
        prefix_lens=tuple(prefix_lens),
        steps=tuple(steps),
        num_kv_heads=(num_kv_heads := draw(st.integers(1, 3))),
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        latent=is_latent,
        fp8=fp8 and not is_latent and draw(st.booleans()),
        windows=tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=2))),
        soft_cap=draw(st.sampled_from((0.0, 2.0))),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        page_size=draw(st.sampled_from((1, 3, 16))),
        kv_groups=kv_groups and draw(st.booleans()),
        bucket=max(1, largest + padding) if graph or draw(st.booleans()) else None,
        extra_rows=draw(st.integers(0, 3)),
        graph=graph,
        layout=draw(st.sampled_from(CacheLayout)),
    )
