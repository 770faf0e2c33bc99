"""The table of conformance cases. Owns which situations are covered, not how they are checked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch

from .case import EMPTY, CacheLayout, Case

Steps = tuple[tuple[tuple[int, int], ...], ...]


def _decode(num_seqs: int, num_steps: int = 1) -> Steps:
    """Steps in which each sequence gets one token."""
    return (tuple((seq, 1) for seq in range(num_seqs)),) * num_steps


def _shapes(page_size: int) -> tuple[Case, ...]:
    """One case of each phase, with lengths around the page boundaries."""
    p = page_size
    edges = (p - 1, p, p + 1, 2 * p + 3, 1, 0)
    prompts = tuple((seq, max(1, n)) for seq, n in enumerate((p - 1, p, p + 1, 1, 2 * p + 2)))
    mixed = ((0, 1), (1, 5), (2, 1), (3, p + 3), (4, 2), (5, 1))
    return (
        Case(name="decode", prefix_lens=edges, steps=_decode(6, 2), page_size=p),
        Case(name="prefill", prefix_lens=(0,) * 5, steps=(prompts, *_decode(5)), page_size=p),
        Case(name="mixed", prefix_lens=edges, steps=(mixed, mixed), page_size=p),
    )


def _named(cases: tuple[Case, ...], label: str) -> tuple[Case, ...]:
    return tuple(replace(case, name=f"{case.name}-{label}") for case in cases)


def _varied() -> tuple[Case, ...]:
    """Group sizes, head dims, page sizes, dtypes, windows, caps and layouts, each in every phase."""
    base = _shapes(16)
    cases: list[Case] = []
    for group_size in range(1, 9):
        shaped = tuple(replace(c, num_heads=2 * group_size) for c in base)
        cases += _named(shaped, f"group{group_size}")
    cases += _named(tuple(replace(c, num_heads=12, num_kv_heads=1) for c in base), "group12")
    cases += _named(tuple(replace(c, num_heads=15, num_kv_heads=5) for c in base), "kvheads5")
    for head_dim in (80, 96, 128, 256):
        cases += _named(tuple(replace(c, head_dim=head_dim) for c in base), f"dim{head_dim}")
    for page_size in (1, 128):
        cases += _named(_shapes(page_size), f"page{page_size}")
    for dtype, label in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        cases += _named(tuple(replace(c, dtype=dtype) for c in base), label)
        cases += _named(tuple(replace(c, dtype=dtype, head_dim=128, num_heads=14) for c in base), f"{label}-dim128")
    for window in (1, 2, 15, 16, 17, 1000):
        cases += _named(tuple(replace(c, windows=(window,)) for c in base), f"window{window}")
    for window in (1, 2, 3):
        cases += _named(tuple(replace(c, windows=(window,)) for c in _shapes(1)), f"page1-window{window}")
    cases += _named(tuple(replace(c, soft_cap=1.5) for c in base), "cap")
    cases += _named(tuple(replace(c, soft_cap=1.5, windows=(5,)) for c in base), "cap-window5")
    cases += _named(tuple(replace(c, windows=(0, 7, 0, 7, 16)) for c in base), "groups3")
    cases += _sinks(base)
    cases += _value_dims(base)
    cases += _fp8(base)
    for layout in (CacheLayout.KV_INTERLEAVED, CacheLayout.HEADS_FIRST):
        cases += _named(tuple(replace(c, layout=layout) for c in base), layout.value)
    cases += _named(tuple(replace(c, poison=300.0) for c in base), "garbage")
    return tuple(cases)


def _kv_groups(base: tuple[Case, ...]) -> tuple[Case, ...]:
    """A page table per window size, with freed pages that are poisoned; two groups, three, and none without window."""
    base = tuple(replace(case, kv_groups=True) for case in base)
    grown = Case(name="steps", prefix_lens=(37, 0, 16, 90), steps=(*_decode(4, 20), ((0, 9), (1, 40), (3, 1))))
    cases: list[Case] = []
    for case in (*base, replace(grown, kv_groups=True)):
        cases += [
            replace(case, windows=(0, 7, 0, 7), name=f"{case.name}-kvgroups"),
            replace(case, windows=(7, 0, 20, 1), name=f"{case.name}-kvgroups3"),
            replace(case, windows=(16, 16), name=f"{case.name}-kvgroups-windows"),
            replace(case, windows=(0, 17), sinks=True, num_heads=6, name=f"{case.name}-kvgroups-sinks"),
            replace(case, windows=(3, 0), soft_cap=1.5, page_size=1, name=f"{case.name}-kvgroups-page1"),
            replace(case, windows=(0, 5), poison=math.inf, dtype=torch.float16, name=f"{case.name}-kvgroups-infinite"),
            replace(case, windows=(0, 5), poison=300.0, name=f"{case.name}-kvgroups-garbage"),
        ]
    chunks = replace(_chunks(19, window=6), windows=(0, 6), kv_groups=True, page_size=4, name="chunks-kvgroups")
    long = Case(
        name="long-decode-kvgroups", prefix_lens=(3000, 1, 800), steps=_decode(3, 2), windows=(0, 1000), kv_groups=True
    )
    chunk = replace(long, name="long-chunk-kvgroups", prefix_lens=(1030, 3), steps=(((0, 300), (1, 1)),))
    return (*cases, chunks, long, replace(chunk, windows=(0, 250)))


def _sinks(base: tuple[Case, ...]) -> tuple[Case, ...]:
    """Attention sinks, alone and with what else changes the softmax or the mapping of heads."""
    base = tuple(replace(case, sinks=True) for case in base)
    return (
        *_named(base, "sinks"),
        *_named(tuple(replace(c, windows=(0, 7), num_heads=10) for c in base), "sinks-windows-group5"),
        *_named(tuple(replace(c, windows=(5,), soft_cap=1.5) for c in base), "sinks-cap-window5"),
        *_named(tuple(replace(c, dtype=torch.bfloat16, num_heads=16) for c in base), "sinks-bf16-group8"),
        *_named(tuple(replace(c, dtype=torch.float16, head_dim=80) for c in base), "sinks-fp16-dim80"),
    )


def _value_dims(base: tuple[Case, ...]) -> tuple[Case, ...]:
    """Value heads of another size than key heads, and latent layers, whose values are part of their keys."""
    cases: list[Case] = []
    for v_head_dim in (32, 128):
        cases += _named(tuple(replace(c, v_head_dim=v_head_dim) for c in base), f"vdim{v_head_dim}")
    expanded = tuple(replace(c, head_dim=192, v_head_dim=128, num_kv_heads=4) for c in base)
    cases += _named(expanded, "dim192-vdim128")
    cases += _named(
        tuple(replace(c, v_head_dim=40, soft_cap=1.5, windows=(0, 5), sinks=True) for c in base), "vdim40-all"
    )
    for layout in (CacheLayout.KV_INTERLEAVED, CacheLayout.HEADS_FIRST):
        cases += _named(tuple(replace(c, layout=layout, v_head_dim=32) for c in base), f"vdim32-{layout.value}")
    small = tuple(replace(c, latent=True, num_kv_heads=1, head_dim=24, v_head_dim=16) for c in base)
    large = tuple(replace(c, latent=True, num_kv_heads=1, head_dim=576, v_head_dim=512) for c in base)
    cases += _named(small, "latent")
    cases += _named(tuple(replace(c, num_heads=16) for c in large), "latent576-group16")
    cases += _named(tuple(replace(c, dtype=torch.bfloat16, num_heads=20) for c in large), "latent576-bf16-group20")
    cases += _named(tuple(replace(c, dtype=torch.float16) for c in large), "latent576-fp16")
    cases += _named(tuple(replace(c, num_kv_heads=2, v_head_dim=0) for c in small), "latent-kvheads2-whole")
    cases += _named(tuple(replace(c, soft_cap=1.5, windows=(0, 5), sinks=True) for c in small), "latent-all")
    cases += _named(
        tuple(replace(c, layout=CacheLayout.HEADS_FIRST, num_kv_heads=2) for c in small), "latent-heads_first"
    )
    return tuple(cases)


def _fp8(base: tuple[Case, ...]) -> tuple[Case, ...]:
    """Caches in fp8, with all else that changes how keys are read, scored or written."""
    base = tuple(replace(case, fp8=True) for case in base)
    cases = list(_named(base, "fp8"))
    for dtype, label in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        cases += _named(tuple(replace(c, dtype=dtype, head_dim=128, num_heads=16) for c in base), f"fp8-{label}-dim128")
    cases += _named(tuple(replace(c, head_dim=80, num_heads=6) for c in base), "fp8-dim80-group3")
    cases += _named(tuple(replace(c, head_dim=256, num_heads=2) for c in base), "fp8-dim256-group1")
    cases += _named(tuple(replace(c, windows=(0, 7, 0), soft_cap=1.5, sinks=True) for c in base), "fp8-all")
    cases += _named(tuple(replace(c, fp8=True, windows=(0, 2)) for c in _shapes(1)), "fp8-page1")
    cases += _named(tuple(replace(c, poison=300.0) for c in base), "fp8-garbage")
    cases += _named(tuple(replace(c, v_head_dim=32) for c in base), "fp8-vdim32")
    for layout in (CacheLayout.KV_INTERLEAVED, CacheLayout.HEADS_FIRST):
        cases += _named(tuple(replace(c, layout=layout) for c in base), f"fp8-{layout.value}")
    return tuple(cases)


def _chunks(length: int, window: int) -> Case:
    """One sequence for each chunk size 1..length, all cut from prompts of one length; finished ones stay, idle."""
    steps = []
    done = [0] * length
    while min(done) < length:
        step = tuple((seq, min(seq + 1, length - done[seq])) for seq in range(length))
        done = [before + n for before, (_, n) in zip(done, step, strict=True)]
        steps.append(step)
    return Case(
        name=f"chunks-window{window}", prefix_lens=(0,) * length, steps=tuple(steps), windows=(window,), head_dim=80
    )


def _orders() -> tuple[Case, ...]:
    """One mixed batch in several orders."""
    rows = ((0, 1), (1, 1), (2, 20), (3, 7), (4, 3))
    orders = {
        "decode-first": rows,
        "prefill-first": rows[::-1],
        "interleaved": (rows[2], rows[0], rows[3], rows[1], rows[4]),
    }
    return tuple(
        Case(name=f"order-{name}", prefix_lens=(33, 5, 0, 16, 40), steps=(order,), windows=(0, 9))
        for name, order in orders.items()
    )


def _empty() -> tuple[Case, ...]:
    """Steps, sequences and rows without tokens."""
    return (
        Case(name="empty-step", prefix_lens=(3,), steps=((), *_decode(1))),
        Case(name="empty-step-padded", prefix_lens=(3,), steps=((), *_decode(1)), bucket=4, extra_rows=2),
        Case(name="empty-queries", prefix_lens=(3, 0, 20), steps=(((0, 0), (1, 0), (2, 0)), ((2, 2), (0, 0)))),
        Case(name="empty-first", prefix_lens=(0, 0, 5), steps=(((0, 0), (1, 9), (2, 4)),)),
        Case(name="empty-middle", prefix_lens=(5, 17, 2), steps=(((0, 3), (1, 0), (2, 4)),)),
        Case(name="empty-last", prefix_lens=(5, 0, 17), steps=(((0, 3), (1, 0), (2, 0)),)),
        Case(name="empty-prefill", prefix_lens=(0, 0, 0), steps=(((0, 6), (1, 0), (2, 17)),)),
        Case(
            name="empty-decode-rows",
            prefix_lens=(15, 40),
            steps=(((EMPTY, 1), (0, 1), (EMPTY, 1), (1, 1), (EMPTY, 1)), ((EMPTY, 1),), ((1, 1), (0, 1))),
        ),
        Case(
            name="empty-decode-rows-page1",
            prefix_lens=(15, 4),
            steps=(((EMPTY, 1), (0, 1), (EMPTY, 1), (1, 1)),),
            page_size=1,
            windows=(0, 2),
        ),
        Case(name="empty-decode-rows-sinks", prefix_lens=(15, 40), steps=(((EMPTY, 1), (0, 1), (1, 1)),), sinks=True),
    )


def _padded() -> tuple[Case, ...]:
    """Persistent buffers padded to a bucket, large batches before small ones; rows beyond the step's tokens."""
    lens = (1, 100, 16, 15, 17, 33, 2)
    shrinking: Steps = (*_decode(7), *_decode(3), ((4, 1),), (), ((6, 1), (1, 1)), *_decode(7, 2))
    prompts: Steps = (((0, 9), (1, 17), (2, 1)), ((0, 2), (2, 1)), ((1, 1), (2, 5)))
    cases = [
        Case(name="padded-decode", prefix_lens=lens, steps=shrinking, bucket=8, extra_rows=3),
        Case(name="padded-mixed", prefix_lens=(0, 3, 30), steps=prompts, bucket=32, windows=(0, 4)),
        Case(name="padded-prefill", prefix_lens=(0, 0, 0), steps=prompts[:1], bucket=32, extra_rows=5),
        Case(
            name="padded-mixed-kvgroups",
            prefix_lens=(0, 3, 30),
            steps=prompts,
            bucket=32,
            windows=(0, 4),
            kv_groups=True,
        ),
        Case(
            name="padded-empty-kvgroups",
            prefix_lens=(15, 40),
            steps=(((EMPTY, 1), (0, 1), (1, 1)), ((EMPTY, 1),)),
            bucket=4,
            windows=(7, 0),
            kv_groups=True,
        ),
        Case(name="extra-rows", prefix_lens=lens, steps=(*_decode(7), ((0, 4), (3, 1))), extra_rows=9),
    ]
    for label, case in (
        ("", cases[0]),
        ("-page1", replace(cases[0], page_size=1)),
        ("-page128", replace(cases[0], page_size=128, num_heads=10)),
        ("-windows", replace(cases[0], windows=(0, 1, 2, 15, 16, 17))),
        ("-cap", replace(cases[0], soft_cap=1.5)),
        ("-sinks", replace(cases[0], sinks=True)),
        ("-sinks-windows", replace(cases[0], sinks=True, windows=(0, 1, 16), soft_cap=1.5, num_heads=6)),
        ("-fp16", replace(cases[0], dtype=torch.float16)),
        ("-bf16", replace(cases[0], dtype=torch.bfloat16, head_dim=128)),
        ("-garbage", replace(cases[0], poison=300.0, windows=(0, 16))),
        ("-heads-first", replace(cases[0], layout=CacheLayout.HEADS_FIRST)),
        ("-vdim", replace(cases[0], head_dim=96, v_head_dim=64, windows=(0, 16))),
        ("-kvgroups", replace(cases[0], windows=(0, 1, 16, 17), kv_groups=True)),
        ("-kvgroups-sinks", replace(cases[0], windows=(5, 0), sinks=True, kv_groups=True, page_size=4)),
        ("-latent", replace(cases[0], latent=True, num_kv_heads=1, head_dim=24, v_head_dim=16, windows=(0, 16))),
        ("-fp8", replace(cases[0], fp8=True, windows=(0, 16, 0))),
        ("-fp8-bf16", replace(cases[0], fp8=True, dtype=torch.bfloat16, head_dim=128, num_heads=10)),
        ("-latent576", replace(cases[0], latent=True, num_kv_heads=1, head_dim=576, v_head_dim=512, num_heads=16)),
    ):
        cases.append(replace(case, name=f"graph-decode{label}", graph=True, extra_rows=0))
    return tuple(cases)


def _bad() -> tuple[Case, ...]:
    """Tokens that are not finite: masked ones do not reach the rows of other tokens, in any step."""
    prompt = Case(
        name="bad-prefill",
        prefix_lens=(0, 0),
        steps=(((0, 40), (1, 21)), ((0, 1), (1, 1)), ((0, 5), (1, 20))),
        bad_tokens=((0, 25), (0, 26), (1, 20)),
    )
    chunk = Case(
        name="bad-chunk",
        prefix_lens=(20, 5),
        steps=(((0, 30), (1, 1)), ((0, 7), (1, 18))),
        bad_tokens=((0, 35), (1, 5), (1, 10)),
    )
    cases = []
    for case in (prompt, chunk):
        cases += [
            case,
            replace(case, name=f"{case.name}-infinite", bad_value=math.inf),
            replace(case, name=f"{case.name}-v", bad_v_only=True),
            replace(case, name=f"{case.name}-v-infinite", bad_v_only=True, bad_value=-math.inf),
            replace(case, name=f"{case.name}-window", windows=(0, 7, 16), num_heads=6),
            replace(case, name=f"{case.name}-v-window", windows=(7, 3), bad_v_only=True),
            replace(case, name=f"{case.name}-cap", soft_cap=1.5),
            replace(case, name=f"{case.name}-sinks", sinks=True, windows=(0, 7)),
            replace(case, name=f"{case.name}-v-vdim", bad_v_only=True, v_head_dim=24),
            replace(case, name=f"{case.name}-fp8", fp8=True),
            replace(case, name=f"{case.name}-infinite-fp8", bad_value=math.inf, fp8=True, windows=(0, 7)),
            replace(case, name=f"{case.name}-v-fp8", bad_v_only=True, bad_value=-math.inf, fp8=True),
            replace(case, name=f"{case.name}-latent", latent=True, num_kv_heads=1, head_dim=24, v_head_dim=16),
            replace(
                case,
                name=f"{case.name}-v-latent",
                bad_v_only=True,
                latent=True,
                num_kv_heads=1,
                v_head_dim=40,
                windows=(7, 3),
            ),
            replace(case, name=f"{case.name}-bf16", dtype=torch.bfloat16, head_dim=128, bucket=64),
        ]
    long = Case(name="bad-long-chunk", prefix_lens=(700,), steps=(((0, 300),),), bad_tokens=((0, 850),), num_heads=2)
    return (*cases, long, replace(long, name="bad-long-chunk-window", windows=(60,), bad_v_only=True))


def _long() -> tuple[Case, ...]:
    """Lengths beyond any tile size."""
    return (
        Case(name="long-prefill", prefix_lens=(0,), steps=(((0, 700),),), num_heads=3, num_kv_heads=1),
        Case(name="long-prefill-window", prefix_lens=(0,), steps=(((0, 700),),), windows=(129,), num_kv_heads=1),
        Case(name="long-chunk", prefix_lens=(1030, 3), steps=(((0, 300), (1, 1)),), windows=(0, 250, 2)),
        Case(name="long-decode", prefix_lens=(3000, 1, 800), steps=_decode(3, 2), windows=(0, 1000)),
        Case(name="long-decode-sinks", prefix_lens=(3000, 1, 800), steps=_decode(3, 2), windows=(0, 1000), sinks=True),
        Case(name="long-chunk-sinks", prefix_lens=(1030, 3), steps=(((0, 300), (1, 1)),), windows=(0, 250), sinks=True),
        Case(name="long-prefill-sinks", prefix_lens=(0,), steps=(((0, 700),),), num_heads=2, sinks=True),
        Case(
            name="long-chunk-latent",
            prefix_lens=(700, 3),
            steps=(((0, 300), (1, 1)),),
            latent=True,
            num_heads=2,
            num_kv_heads=1,
            head_dim=96,
            v_head_dim=64,
        ),
        Case(
            name="long-decode-latent",
            prefix_lens=(3000, 1, 800),
            steps=_decode(3),
            latent=True,
            num_heads=2,
            num_kv_heads=1,
            head_dim=96,
            v_head_dim=64,
        ),
        Case(name="long-decode-fp8", prefix_lens=(3000, 1, 800), steps=_decode(3, 2), windows=(0, 1000), fp8=True),
        Case(name="long-chunk-fp8", prefix_lens=(700, 3), steps=(((0, 300), (1, 1)),), windows=(0, 250), fp8=True),
        Case(name="long-prefill-fp8", prefix_lens=(0,), steps=(((0, 500),),), num_heads=2, fp8=True),
        Case(name="long-chunk-cap", prefix_lens=(400,), steps=(((0, 300),),), soft_cap=1.5, num_heads=2),
    )


CASES: Final[tuple[Case, ...]] = (
    *_bad(),
    *_shapes(16),
    *_kv_groups(_shapes(16)),
    *_varied(),
    _chunks(19, window=0),
    _chunks(19, window=6),
    *_orders(),
    *_empty(),
    *_padded(),
    *_long(),
)
"""All cases; their names are unique."""
