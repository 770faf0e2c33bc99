"""Scenarios: sequences of steps in which the graph execution of other projects has failed.

Owns the order of steps only: what must hold in every step is checked by the harness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .comparison import Check, ConformanceError, check_close
from .harness import ReplayHarness

Scenario = Callable[[ReplayHarness], None]


def every_live_size(harness: ReplayHarness) -> None:
    """Decode batches of every size from none to the largest, so that every live size of every bucket occurs."""
    requests = _started(harness, harness.limits.max_num_seqs)
    for size in range(harness.limits.max_num_seqs + 1):
        harness.step(*((number, 1) for number in requests[:size]))


def shrinking_batches(harness: ReplayHarness) -> None:
    """A large batch, then smaller ones in the same and in smaller buckets, and back: no stale data may remain."""
    largest = harness.limits.max_num_seqs
    requests = _started(harness, largest)
    for size in (largest, largest - 1, largest // 2 + 1, 3, largest, 1, 2, 0, largest):
        harness.step(*((number, 1) for number in requests[:size]))


def other_lengths(harness: ReplayHarness) -> None:
    """Replays graphs, which were captured without a live row, with the longest sequences, across pages and windows."""
    limits = harness.limits
    long, short = harness.add(), harness.add()
    _prefill(harness, long, limits.max_model_len - 2)
    _prefill(harness, short, 1)
    harness.step((short, 1), (long, 1))
    harness.step((long, 1), (short, 1))
    for _ in range(2 * limits.page_size + 1):
        harness.step((short, 1))


def prefix_hits(harness: ReplayHarness) -> None:
    """Requests that share a prefix's pages with a running request, in whole prompts, chunks and decode."""
    page_size = harness.limits.page_size
    first = harness.add()
    _prefill(harness, first, 2 * page_size + 1)
    hits = [harness.add(like=first, shared_pages=pages) for pages in (1, 2, 2)]
    harness.step((hits[0], page_size + 1), (first, 1), (hits[1], 3))
    harness.step((hits[2], 1), (hits[0], 1), (first, 1), (hits[1], 1))
    harness.drop(hits[0])
    harness.step((hits[2], 1), (first, 1), (hits[1], 1))
    harness.step((harness.add(like=first, shared_pages=2), 2), (hits[2], 1))
    harness.drop(first)
    harness.step((hits[1], 1), (hits[2], 1))


def mixed_orders(harness: ReplayHarness) -> None:
    """Decode before, after and between prefills: each request gets the same result in any order."""
    page_size = harness.limits.page_size
    requests = [harness.add() for _ in range(4)]
    for number, count in zip(requests, (1, page_size, page_size + 1, 3), strict=True):
        _prefill(harness, number, count)
    harness.step((requests[0], 1), (requests[1], 1), (harness.add(), 5))
    harness.step((harness.add(), 4), (requests[0], 1), (requests[2], 2))
    harness.step((requests[3], 1), (harness.add(), page_size), (requests[1], 1), (harness.add(), 1))


def chunk_sizes(harness: ReplayHarness) -> None:
    """A prompt in chunks of every size gives the logits of the prompt as a whole."""
    length = min(harness.limits.max_model_len, 11)
    whole = harness.add()
    expected = harness.step((whole, length))
    for size in range(1, length):
        copy = harness.copy(whole)
        for start in range(0, length, size):
            logits = harness.step((copy, min(size, length - start)))
        check_close(Check.CHUNKED_LOGITS, f"eager logits of chunks of {size}", logits, expected)
        harness.drop(copy)


def several_tokens_in_decode(harness: ReplayHarness) -> None:
    """Verification of drafts: several tokens per sequence, with logits of every row."""
    requests = _started(harness, 3)
    for counts in ((2, 2, 2), (1, 4, 2), (3, 1, 1)):
        harness.step(*zip(requests, counts, strict=True), logits=range(sum(counts)))


def selected_logits(harness: ReplayHarness) -> None:
    """Logits of any rows in any order, of no row, and hidden states, in decode and in prefill."""
    requests = _started(harness, 3)
    harness.step(*((number, 1) for number in requests), logits=(2, 0))
    harness.step(*((number, 1) for number in requests), logits=())
    harness.step((requests[0], 3), (requests[1], 2), logits=(4, 1, 1))
    harness.step((requests[2], 2), (requests[1], 2), logits=())
    harness.step_hidden(*((number, 1) for number in requests))
    harness.step_hidden((requests[0], 2), (requests[2], 1))


def empty_steps(harness: ReplayHarness) -> None:
    """No sequence, no token, and sequences of length 0 among others."""
    harness.step()
    silent, speaking = harness.add(), harness.add()
    harness.step((silent, 0), (speaking, 3))
    harness.step((speaking, 2), (silent, 0))
    harness.step()
    harness.step((speaking, 1))


def every_token_bucket(harness: ReplayHarness) -> None:
    """Prompts around every border between buckets of tokens, up to the largest."""
    limits = harness.limits
    size = 1
    while size <= limits.max_num_tokens:
        for total in sorted({max(1, size - 1), size, min(size + 1, limits.max_num_tokens)}):
            parts, left = [], total
            while left:
                count = min(left, limits.max_model_len)
                parts.append((harness.add(), count))
                left -= count
            if len(parts) > limits.max_num_seqs:
                return
            harness.step(*parts)
            for number, _ in parts:
                harness.drop(number)
        size *= 2


def kinds_in_turn(harness: ReplayHarness) -> None:
    """Decode and other steps in turn, of changing sizes: a graph must not rely on the contents of the shared pool."""
    random = harness.random
    requests: list[int] = []
    for _ in range(24):
        if len(requests) < harness.limits.max_num_seqs // 2:
            requests.append(harness.add())
        parts, left = [], harness.limits.max_num_tokens
        for number in requests:
            room = harness.limits.max_model_len - harness.length(number)
            decode = harness.length(number) and torch.rand((), generator=random) < 0.8
            count = 1 if decode else int(torch.randint(1, 6, (), generator=random))
            if count <= min(room, left):
                parts.append((number, count))
                left -= count
        order = torch.randperm(len(parts), generator=random).tolist()
        harness.step(*(parts[i] for i in order))
        done = [number for number in requests if harness.length(number) + 6 > harness.limits.max_model_len]
        for number in done:
            requests.remove(number)
            harness.drop(number)


def all_under_graphs(harness: ReplayHarness) -> None:
    """No step runs eagerly, which it would if its graph was never captured."""
    kinds_in_turn(harness)
    steps = harness.runners.stats.steps
    if not steps or steps.get("eager", 0):
        reasons = dict(harness.runners.stats.eager_reasons)
        raise ConformanceError(Check.EAGER_STEPS, f"steps ran eagerly: {dict(steps)}, {reasons}")


SCENARIOS: Sequence[Scenario] = (
    every_live_size,
    shrinking_batches,
    other_lengths,
    prefix_hits,
    mixed_orders,
    chunk_sizes,
    several_tokens_in_decode,
    selected_logits,
    empty_steps,
    every_token_bucket,
    kinds_in_turn,
    all_under_graphs,
)
"""All of them. A harness needs 8 sequences, 16 tokens, 24 tokens a sequence and pages of at most 4 for them."""


def _started(harness: ReplayHarness, count: int) -> list[int]:
    """Requests of different short prompts, in the cache."""
    requests = [harness.add() for _ in range(count)]
    for number in requests:
        _prefill(harness, number, 1 + number % (2 * harness.limits.page_size))
    return requests


def _prefill(harness: ReplayHarness, number: int, count: int) -> None:
    """Brings a prompt into the cache in chunks that every bucket size serves."""
    while count:
        chunk = min(count, harness.limits.max_num_tokens)
        harness.step((number, chunk))
        count -= chunk
