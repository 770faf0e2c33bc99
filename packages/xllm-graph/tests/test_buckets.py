"""Bucket series, and the sizes that a configuration may set."""

from __future__ import annotations

import pytest

from xllm_graph import parse_buckets, sequence_buckets, token_buckets
from xllm_graph.buckets import bucket_for


def test_sequences() -> None:
    assert sequence_buckets(1) == (1,)
    assert sequence_buckets(8) == (1, 2, 4, 8)
    assert sequence_buckets(9) == (1, 2, 4, 8, 16)
    assert sequence_buckets(100) == (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112)


def test_capacity_has_no_cliff() -> None:
    """A limit of 100 is served up to 100, not up to the largest bucket below it."""
    assert [bucket_for(sequence_buckets(100), n) for n in (0, 13, 96, 97, 100)] == [1, 16, 96, 112, 112]
    assert bucket_for(sequence_buckets(100), 113) is None


def test_tokens() -> None:
    small = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    middle = (512, 768, 1024, 1280, 1536, 1792, 2048)
    assert token_buckets(8192) == (*small, *middle, 3072, 4096, 5120, 6144, 7168, 8192)
    assert token_buckets(300) == (*small, 512)
    assert token_buckets(3) == (1, 2, 4)


def test_sizes_from_a_configuration() -> None:
    assert parse_buckets("1,3, 16") == (1, 3, 16)
    for text, message in (
        ("1,x", "graph buckets are '1,x'; they must be whole numbers"),
        ("", "whole numbers"),
        ("4,2", r"graph buckets are \[4, 2\]; they must be rising numbers of at least 1"),
        ("0,2", "rising numbers of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_buckets(text)
    with pytest.raises(ValueError, match="max_num_seqs is 0; it must be at least 1"):
        sequence_buckets(0)
