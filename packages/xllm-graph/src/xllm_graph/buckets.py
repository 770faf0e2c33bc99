"""Bucket sizes, to which the rows or tokens of a step are padded: the series, and the search for a bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise


def sequence_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of decode graphs: 1, 2, 4, 8, then steps of 16, up to the first that holds `max_num_seqs`."""
    return _up_to(max_num_seqs, "max_num_seqs", (1, 2, 4, 8), ((16, None),))


def token_buckets(max_num_tokens: int) -> tuple[int, ...]:
    """Tokens of piecewise graphs: 1, 2, 4, ..., 256, steps of 256 to 2,048, then of 1,024, up to the first that holds
    `max_num_tokens`."""
    powers = tuple(2**i for i in range(9))
    return _up_to(max_num_tokens, "max_num_tokens", powers, ((256, 2048), (1024, None)))


def parse_buckets(text: str) -> tuple[int, ...]:
    """Parses the sizes of a configuration, such as "1,2,4,8".

    Raises:
        ValueError: an entry that is no number of at least 1, or sizes that do not rise.
    """
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"graph buckets are {text!r}; they must be whole numbers, separated by commas") from None
    return checked_buckets(sizes)


def checked_buckets(sizes: Iterable[int]) -> tuple[int, ...]:
    """The sizes as a tuple. Raises `ValueError` if it is empty, a size is below 1, or the sizes do not rise."""
    sizes = tuple(sizes)
    if not sizes or sizes[0] < 1 or any(low >= high for low, high in pairwise(sizes)):
        raise ValueError(f"graph buckets are {list(sizes)}; they must be rising numbers of at least 1")
    return sizes


def bucket_for(sizes: tuple[int, ...], count: int) -> int | None:
    """The smallest size of at least `count`; None if all are smaller."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def _up_to(limit: int, name: str, sizes: tuple[int, ...], steps: tuple[tuple[int, int | None], ...]) -> tuple[int, ...]:
    if limit < 1:
        raise ValueError(f"{name} is {limit}; it must be at least 1")
    grown = list(sizes)
    for step, last in steps:
        while grown[-1] < limit and (last is None or grown[-1] < last):
            grown.append((grown[-1] // step + 1) * step)
    end = bucket_for(tuple(grown), limit)
    assert end is not None
    return tuple(size for size in grown if size <= end)
