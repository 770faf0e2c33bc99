"""The work list of decode steps, made in Triton's interpreter: every key once, the same share for every program."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xllm_attention.backends.triton_backend.worklist import (
    BEGIN,
    CHUNKS,
    EMPTY_BEGIN,
    EMPTY_END,
    END,
    FIRST,
    ITEM_WIDTH,
    KV_LEN,
    RUN_BEGIN,
    RUN_END,
    TOKEN,
    worklist_kernel,
)

UNIT, BLOCK_I = 16, 32


def make_list(lens: list[int], wave: int, most: int, enough: int, window: int) -> list[list[int]]:
    """The list [capacity, ITEM_WIDTH] of a decode step whose sequences have these KV lengths."""
    capacity = len(lens) + wave * most
    indptr = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
    slots = torch.zeros(len(lens), dtype=torch.int32)
    items = torch.full((capacity, ITEM_WIDTH.value), -7, dtype=torch.int32)
    kernel: Any = worklist_kernel
    kernel[(-(-capacity // BLOCK_I),)](
        indptr, indptr, indptr, slots, slots, slots, items, 0, len(lens), capacity, capacity, wave,
        G=2, WINDOW=window, DECODE=True, BLOCK_M=16, UNIT=UNIT, LEAST_UNITS=1, ENOUGH_UNITS=enough,
        BLOCK_B=32, BLOCK_I=BLOCK_I,
    )  # fmt: skip
    listed: list[list[int]] = items.tolist()
    return listed


@given(
    lens=st.lists(st.integers(0, 300) | st.sampled_from((0, 1, UNIT, UNIT + 1, 256)), min_size=1, max_size=12),
    wave=st.integers(1, 9),
    most=st.integers(1, 3),
    enough=st.integers(1, 8),
    window=st.sampled_from((0, 0, 1, 40)),
)
@example(lens=[256] * 10, wave=4, most=1, enough=1, window=0)  # more sequences than programs
@example(lens=[256] * 2, wave=8, most=1, enough=1, window=0)  # fewer
@settings(max_examples=60, deadline=None)
def test_every_key_once_in_equal_shares(lens: list[int], wave: int, most: int, enough: int, window: int) -> None:
    items = make_list(lens, wave, most, enough, window)
    seen = [min(length, window) if window else length for length in lens]
    units = [-(-keys // UNIT) for keys in seen]

    runs = [(row[RUN_BEGIN.value], row[RUN_END.value]) for row in items]
    count = runs[-1][1]
    assert runs[0][0] == 0
    assert all(first[1] == second[0] for first, second in pairwise(runs))
    assert all(begin == end for begin, end in runs[wave * most :])

    done = {row: length - keys for row, (length, keys) in enumerate(zip(lens, seen, strict=True))}
    for index, item in enumerate(items[:count]):
        row, begin, end = item[TOKEN.value], item[BEGIN.value], item[END.value]
        of_row = [number for number in range(count) if items[number][TOKEN.value] == row]
        assert (item[FIRST.value], item[CHUNKS.value]) == (of_row[0], len(of_row))
        assert of_row == list(range(of_row[0], of_row[-1] + 1))
        assert item[KV_LEN.value] == lens[row]
        assert begin == done[row]
        assert end > begin
        assert (begin - lens[row] + seen[row]) % UNIT == 0
        done[row] = end
        assert index < len(lens) + wave * most
    assert done == dict(enumerate(lens))

    programs = wave * max(1, min(sum(units) // (wave * enough), most, sum(map(bool, units))))
    share = -(-sum(units) // programs)
    for begin, end in runs:
        spans = [item[END.value] - item[BEGIN.value] for item in items[begin:end]]
        assert sum(-(-span // UNIT) for span in spans) <= share

    empties = [(row[EMPTY_BEGIN.value], row[EMPTY_END.value]) for row in items]
    end = empties[-1][1]
    assert empties[0][0] == count
    assert all(first[1] == second[0] for first, second in pairwise(empties))
    assert all(begin == end for begin, end in empties[wave * most :])
    assert [item[TOKEN.value] for item in items[count:end]] == [row for row, length in enumerate(lens) if not length]
    for item in items[count:end]:
        assert item[BEGIN.value] == item[END.value] == item[KV_LEN.value] == 0
        assert item[CHUNKS.value] == 1
    assert max(end - begin for begin, end in empties) <= -(-lens.count(0) // (wave * most))


@pytest.mark.parametrize(("num_pages", "most"), [(0, 9), (1, 9), (512, 512), (2000, 2048), (2000, 700), (2000, 0)])
def test_page_indices_are_copied_on_the_way(num_pages: int, most: int) -> None:
    """As many as the step has, and no more than there is room for."""
    pages, kept = torch.arange(2048, dtype=torch.int32), torch.full((2048,), -1, dtype=torch.int32)
    indptr, slots = torch.tensor([0, 40, 90], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    table = torch.tensor([0, num_pages // 2, num_pages], dtype=torch.int32)
    items = torch.zeros((64, ITEM_WIDTH.value), dtype=torch.int32)
    kernel: Any = worklist_kernel
    kernel[(2,)](
        indptr, indptr, table, slots, pages, kept, items, most, 2, 64, 64, 31,
        G=2, WINDOW=0, DECODE=True, BLOCK_M=16, UNIT=UNIT, LEAST_UNITS=1, ENOUGH_UNITS=1, BLOCK_B=32, BLOCK_I=BLOCK_I,
    )  # fmt: skip
    copied = min(num_pages, most)
    assert torch.equal(kept[:copied], pages[:copied])
    assert (kept[copied:] == -1).all()


@given(
    lens=st.lists(st.integers(1, 300), min_size=1, max_size=9),
    num_padding=st.integers(1, 9),
    wave=st.integers(1, 9),
    most=st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_padding_does_not_change_how_keys_are_cut(lens: list[int], num_padding: int, wave: int, most: int) -> None:
    cut = [make_list(padded, wave, most, 1, 0) for padded in (lens, lens + [0] * num_padding)]
    runs = [[(row[RUN_BEGIN.value], row[RUN_END.value]) for row in items[: wave * most]] for items in cut]
    assert runs[0] == runs[1]
    count = runs[0][-1][1]
    for plain, padded in zip(cut[0][:count], cut[1][:count], strict=True):
        assert plain[: RUN_BEGIN.value] == padded[: RUN_BEGIN.value]
