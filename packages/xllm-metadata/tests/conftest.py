"""Random batches for several test files: a hypothesis strategy and a plain function, as fixtures."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arguments of build_attention_metadata, and the number of pages in the cache."""

    q_lens: list[int]
    kv_lens: list[int]
    page_tables: list[list[int]]
    page_size: int
    num_pages: int


def make_batch(draw_int: Callable[[int, int], int], phase: str, page_size: int, num_seqs: int, max_len: int) -> Batch:
    """A batch whose sequences share no page. phase: prefill, chunked, decode or empty."""
    q_lens, kv_lens = [], []
    for _ in range(0 if phase == "empty" else num_seqs):
        kv_len = draw_int(1 if phase == "decode" else 0, max_len)
        kv_lens.append(kv_len)
        q_lens.append({"decode": 1, "prefill": kv_len}.get(phase, draw_int(0, kv_len)))
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    num_pages = sum(counts) + draw_int(1, 5)
    order = list(range(num_pages))
    random.Random(draw_int(0, 2**16)).shuffle(order)
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return Batch(q_lens=q_lens, kv_lens=kv_lens, page_tables=tables, page_size=page_size, num_pages=num_pages)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Random legal batches of every phase."""

    def draw_int(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    return make_batch(
        draw_int,
        draw(st.sampled_from(["prefill", "chunked", "decode", "empty"])),
        draw(st.sampled_from([1, 2, 16, 128])),
        draw_int(1, 6),
        40,
    )


@pytest.fixture(scope="session")
def batch_strategy() -> st.SearchStrategy[Batch]:
    return batches()


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., Batch]:
    """make_batch driven by a random.Random, for loops that hypothesis would be too slow for."""

    def make(rng: random.Random, phase: str, page_size: int, num_seqs: int, max_len: int) -> Batch:
        return make_batch(rng.randint, phase, page_size, num_seqs, max_len)

    return make
