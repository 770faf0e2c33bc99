"""The situations in which graph execution has gone wrong elsewhere, each as steps of a `World`.

Owns the order of steps only: what must hold in every step is checked by the world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .comparison import ConformanceError, check_close
from .world import World

Scenario = Callable[[World], None]


def every_live_size(world: World) -> None:
    """Decode batches of every size from none to the largest, so that every live size of every bucket occurs."""
    requests = _started(world, world.limits.max_num_seqs)
    for size in range(world.limits.max_num_seqs + 1):
        world.step(*((number, 1) for number in requests[:size]))


def shrinking_batches(world: World) -> None:
    """A large batch, then smaller ones in the same and in smaller buckets, and back: nothing of it may stay behind."""
    largest = world.limits.max_num_seqs
    requests = _started(world, largest)
    for size in (largest, largest - 1, largest // 2 + 1, 3, largest, 1, 2, 0, largest):
        world.step(*((number, 1) for number in requests[:size]))


def other_lengths(world: World) -> None:
    """Captured without a live row, replayed with the longest, with page borders and windows crossed on the way."""
    limits = world.limits
    long, short = world.add(), world.add()
    _prefill(world, long, limits.max_model_len - 2)
    _prefill(world, short, 1)
    world.step((short, 1), (long, 1))
    world.step((long, 1), (short, 1))
    for _ in range(2 * limits.page_size + 1):
        world.step((short, 1))


def prefix_hits(world: World) -> None:
    """Requests that begin behind pages of another one, in whole prompts, chunks and decode, while it goes on."""
    page_size = world.limits.page_size
    first = world.add()
    _prefill(world, first, 2 * page_size + 1)
    hits = [world.add(like=first, shared_pages=pages) for pages in (1, 2, 2)]
    world.step((hits[0], page_size + 1), (first, 1), (hits[1], 3))
    world.step((hits[2], 1), (hits[0], 1), (first, 1), (hits[1], 1))
    world.drop(hits[0])
    world.step((hits[2], 1), (first, 1), (hits[1], 1))
    world.step((world.add(like=first, shared_pages=2), 2), (hits[2], 1))
    world.drop(first)
    world.step((hits[1], 1), (hits[2], 1))


def mixed_orders(world: World) -> None:
    """Decode before prefill, after it, and between: in any order each request gets the same."""
    page_size = world.limits.page_size
    requests = [world.add() for _ in range(4)]
    for number, count in zip(requests, (1, page_size, page_size + 1, 3), strict=True):
        _prefill(world, number, count)
    world.step((requests[0], 1), (requests[1], 1), (world.add(), 5))
    world.step((world.add(), 4), (requests[0], 1), (requests[2], 2))
    world.step((requests[3], 1), (world.add(), page_size), (requests[1], 1), (world.add(), 1))


def chunk_sizes(world: World) -> None:
    """A prompt in chunks of every size gives the logits of the prompt as a whole."""
    length = min(world.limits.max_model_len, 11)
    whole = world.add()
    expected = world.step((whole, length))
    for size in range(1, length):
        copy = world.copy(whole)
        for start in range(0, length, size):
            logits = world.step((copy, min(size, length - start)))
        check_close(f"logits of chunks of {size}", logits, expected)
        world.drop(copy)


def several_tokens_in_decode(world: World) -> None:
    """Verification of drafts: several tokens a sequence, with logits of every row."""
    requests = _started(world, 3)
    for counts in ((2, 2, 2), (1, 4, 2), (3, 1, 1)):
        world.step(*zip(requests, counts, strict=True), logits=range(sum(counts)))


def selected_logits(world: World) -> None:
    """Any rows in any order, none, and hidden states instead, in decode and in prefill."""
    requests = _started(world, 3)
    world.step(*((number, 1) for number in requests), logits=(2, 0))
    world.step(*((number, 1) for number in requests), logits=())
    world.step((requests[0], 3), (requests[1], 2), logits=(4, 1, 1))
    world.step((requests[2], 2), (requests[1], 2), logits=())
    world.step_hidden(*((number, 1) for number in requests))
    world.step_hidden((requests[0], 2), (requests[2], 1))


def empty_steps(world: World) -> None:
    """No sequence, no token, and sequences of length 0 among others."""
    world.step()
    silent, speaking = world.add(), world.add()
    world.step((silent, 0), (speaking, 3))
    world.step((speaking, 2), (silent, 0))
    world.step()
    world.step((speaking, 1))


def every_token_bucket(world: World) -> None:
    """Prompts around every border between buckets of tokens, up to the largest."""
    limits = world.limits
    size = 1
    while size <= limits.max_num_tokens:
        for total in sorted({max(1, size - 1), size, min(size + 1, limits.max_num_tokens)}):
            parts, left = [], total
            while left:
                count = min(left, limits.max_model_len)
                parts.append((world.add(), count))
                left -= count
            if len(parts) > limits.max_num_seqs:
                return
            world.step(*parts)
            for number, _ in parts:
                world.drop(number)
        size *= 2


def kinds_in_turn(world: World) -> None:
    """Decode and other steps in turn, of changing sizes: the graphs share one pool and must not rely on it."""
    random = world.random
    requests: list[int] = []
    for _ in range(24):
        if len(requests) < world.limits.max_num_seqs // 2:
            requests.append(world.add())
        parts, left = [], world.limits.max_num_tokens
        for number in requests:
            room = world.limits.max_model_len - world.length(number)
            decode = world.length(number) and torch.rand((), generator=random) < 0.8
            count = 1 if decode else int(torch.randint(1, 6, (), generator=random))
            if count <= min(room, left):
                parts.append((number, count))
                left -= count
        order = torch.randperm(len(parts), generator=random).tolist()
        world.step(*(parts[i] for i in order))
        done = [number for number in requests if world.length(number) + 6 > world.limits.max_model_len]
        for number in done:
            requests.remove(number)
            world.drop(number)


def all_under_graphs(world: World) -> None:
    """No step of any kind has run eagerly: a graph that was never captured would show here."""
    kinds_in_turn(world)
    steps = world.runners.stats.steps
    if not steps or steps.get("eager", 0):
        raise ConformanceError(f"steps ran eagerly: {dict(steps)}, {dict(world.runners.stats.eager_reasons)}")


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
"""All of them. A world needs 8 sequences, 16 tokens, 24 tokens a sequence and pages of at most 4 for them."""


def _started(world: World, count: int) -> list[int]:
    """Requests of different short prompts, in the cache."""
    requests = [world.add() for _ in range(count)]
    for number in requests:
        _prefill(world, number, 1 + number % (2 * world.limits.page_size))
    return requests


def _prefill(world: World, number: int, count: int) -> None:
    """Brings a prompt into the cache in chunks that every bucket size serves."""
    while count:
        chunk = min(count, world.limits.max_num_tokens)
        world.step((number, chunk))
        count -= chunk
