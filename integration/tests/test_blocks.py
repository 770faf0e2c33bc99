"""Block manager without prefix cache: no page is shared or lost, and a failed growth changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

Ask = Callable[[str, Any], Any]

OPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.sampled_from("abcd"), st.integers(0, 60)),
        st.tuples(st.just("release"), st.sampled_from("abcd")),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 3, 16]), ops=OPS)
def test_pages_are_owned_once_and_come_back(
    ask: Ask, num_blocks: int, block_size: int, ops: list[tuple[Any, ...]]
) -> None:
    results = ask("blocks", {"num_blocks": num_blocks, "block_size": block_size, "ops": ops})
    tables: dict[str, list[int]] = {}
    for (op, name, *args), result in zip(ops, results, strict=True):
        before = tables.get(name, [])
        num_free = num_blocks - sum(map(len, tables.values()))
        if op == "release":
            expected_pages, ok = 0, True
        else:
            wanted = max(len(before), -(-args[0] // block_size))
            ok = wanted - len(before) <= num_free
            expected_pages = wanted if ok else len(before)
        assert result["ok"] == ok
        assert len(result["table"]) == expected_pages
        assert result["table"][: len(before)] == before[:expected_pages]
        tables[name] = result["table"]
        owned = [page for table in tables.values() for page in table]
        assert len(set(owned)) == len(owned)
        assert all(0 <= page < num_blocks for page in owned)
        assert result["num_free"] == num_blocks - len(owned)


def test_a_cache_without_pages_is_refused(ask: Ask) -> None:
    answer = ask("blocks", {"num_blocks": 0, "block_size": 16, "ops": []})
    assert answer["error"] == "a KV cache of 0 pages of 16 tokens; both must be at least 1"
