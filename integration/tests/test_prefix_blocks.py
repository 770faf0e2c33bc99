"""Block manager with a prefix cache, compared with a simple Python model: hits, pages, evictions and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

Ask = Callable[[str, Any], Any]
Op = tuple[Any, ...]
Tokens = tuple[int, ...]

# Two token values and short pages: many sequences share a prefix.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
NAMES = st.sampled_from("abcd")
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), NAMES, TOKENS),
        st.tuples(st.just("compute"), NAMES, st.integers(1, 12)),
        st.tuples(st.just("append"), NAMES, st.integers(0, 1)),
        st.tuples(st.sampled_from(["release", "release", "discard"]), NAMES),
    ),
    min_size=10,
    max_size=60,
)


class PrefixModel:
    """A simple prefix cache: {all tokens up to the end of a page: page}, and the time of each page's last use."""

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.num_blocks, self.page_size = num_blocks, page_size
        self.cached: dict[Tokens, int] = {}
        self.last_used: dict[Tokens, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.now = self.num_queried = self.num_hit = self.num_evicted = 0

    def used(self) -> set[int]:
        return {page for table in self.tables.values() for page in table}

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - self.used() - set(self.cached.values())

    def idle(self) -> list[Tokens]:
        used = self.used()
        return [prefix for prefix, page in self.cached.items() if page not in used]

    def has_children(self, prefix: Tokens) -> bool:
        return any(other[: -self.page_size] == prefix for other in self.cached)

    def take(self, count: int, got: list[int]) -> None:
        """`got` must be free pages first, then the least recently used pages without children."""
        assert len(got) == len(set(got)) == count
        free = self.free()
        num_free = min(count, len(free))
        assert set(got[:num_free]) <= free
        for page in got[num_free:]:
            leaves = [prefix for prefix in self.idle() if not self.has_children(prefix)]
            oldest = min(leaves, key=lambda prefix: self.last_used[prefix])
            assert self.cached.pop(oldest) == page
            self.num_evicted += 1

    def num_available(self) -> int:
        return len(self.free()) + len(self.idle())

    def begin(self, name: str, tokens: list[int], table: list[int]) -> bool:
        if name in self.tables:
            return False
        pages = -(-len(tokens) // self.page_size)
        hits: list[int] = []
        # A page whose end is the last token is no hit.
        for end in range(self.page_size, len(tokens), self.page_size):
            if tuple(tokens[:end]) not in self.cached:
                break
            hits.append(self.cached[tuple(tokens[:end])])
        num_idle = len(set(hits) - self.used())
        if pages - len(hits) > self.num_available() - num_idle:
            return False
        assert table[: len(hits)] == hits
        self.tables[name] = hits
        self.take(pages - len(hits), table[len(hits) :])
        self.tables[name] = table
        self.tokens[name], self.num_cached[name] = tokens, len(hits) * self.page_size
        self.num_queried += len(tokens)
        self.num_hit += len(hits) * self.page_size
        return True

    def compute(self, name: str, at_most: int, table: list[int]) -> bool:
        before = self.num_cached[name]
        after = min(before + at_most, len(self.tokens[name]))
        for i in range(before // self.page_size, after // self.page_size):
            page = self.cached.setdefault(tuple(self.tokens[name][: (i + 1) * self.page_size]), self.tables[name][i])
            self.tables[name][i] = page  # the equal page of another sequence, if cached
        assert table == self.tables[name]
        self.num_cached[name] = after
        return after > before

    def append(self, name: str, token: int, table: list[int]) -> bool:
        length = len(self.tokens[name])
        missing = -(-(length + 1) // self.page_size) - len(self.tables[name])
        if self.num_cached[name] < length or missing > self.num_available():
            return False
        self.take(missing, table[len(self.tables[name]) :])
        self.tables[name] = table
        self.tokens[name].append(token)
        return True

    def end(self, kind: str, name: str) -> bool:
        table, tokens = self.tables.pop(name), self.tokens.pop(name)
        del self.num_cached[name]
        self.now += 1
        used = self.used()
        for i in reversed(range(len(table))):
            prefix = tuple(tokens[: (i + 1) * self.page_size])
            if table[i] in used or self.cached.get(prefix) != table[i]:
                continue
            self.last_used[prefix] = self.now
            if kind == "discard" and not self.has_children(prefix):
                del self.cached[prefix]
        return True

    def apply(self, op: Op, table: list[int]) -> bool:
        kind, name = op[:2]
        if kind == "begin":
            return self.begin(name, list(op[2]), table)
        if name not in self.tables:
            return False
        if kind == "compute":
            return self.compute(name, op[2], table)
        return self.append(name, op[2], table) if kind == "append" else self.end(kind, name)


@settings(deadline=None, max_examples=300)
@given(num_blocks=st.integers(1, 12), page_size=st.sampled_from([1, 2, 3]), hashes_collide=st.booleans(), ops=OPS)
def test_the_block_manager_equals_the_python_model(
    ask: Ask, num_blocks: int, page_size: int, hashes_collide: bool, ops: list[Op]
) -> None:
    question = {"num_blocks": num_blocks, "block_size": page_size, "hashes_collide": hashes_collide, "ops": ops}
    model = PrefixModel(num_blocks, page_size)
    for op, result in zip(ops, ask("prefixes", question), strict=True):
        assert model.apply(op, result["tables"].get(op[1], [])) == result["ok"]
        assert result["tables"] == model.tables
        assert result["num_cached"] == model.num_cached.get(op[1], 0)
        assert result["num_free"] == model.num_available()
        assert result["num_cached_blocks"] == len(model.cached)
        counts = (result["num_queried_tokens"], result["num_hit_tokens"], result["num_evicted_blocks"])
        assert counts == (model.num_queried, model.num_hit, model.num_evicted)


def test_a_page_is_found_only_under_its_parent(ask: Ask) -> None:
    """Equal pages after different prefixes, with colliding hashes: no page of the other sequence is hit."""
    ops: list[Op] = []
    for name, tokens in (("a", [1, 1, 5, 5, 9]), ("b", [2, 2, 5, 5, 9]), ("c", [2, 2, 5, 5, 8])):
        ops += [("begin", name, tokens), ("compute", name, 5)]
    results = ask("prefixes", {"num_blocks": 9, "block_size": 2, "hashes_collide": True, "ops": ops})
    assert [result["num_hit_tokens"] for result in results[::2]] == [0, 0, 4]
    tables = results[-1]["tables"]
    assert tables["c"][:2] == tables["b"][:2]
    assert not set(tables["a"]) & set(tables["b"])
