"""`MixedWorkload`: many requests of random lengths through continuous batching, chunked prefill and prefix hits.

Owns a small scheduler. What must hold in every step is checked by the `ReplayHarness`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from .harness import ReplayHarness


@dataclass(slots=True)
class _Running:
    number: int
    prompt: int  # length of the prompt
    total: int  # prompt and answer


class MixedWorkload:
    """Schedules decode of all running requests, then chunks of the next prompts up to the token and sequence limits.

    Args:
        harness: whose limits are kept.
        num_requests: in all.
        token_budget: of one step.
        max_prompt, max_answer: tokens of a request at most.
    """

    def __init__(
        self, harness: ReplayHarness, *, num_requests: int, token_budget: int, max_prompt: int, max_answer: int
    ) -> None:
        self._harness = harness
        self._waiting = num_requests
        self._budget = token_budget
        self._max_prompt, self._max_answer = max_prompt, max_answer
        self._running: deque[_Running] = deque()
        self.num_hits = 0
        self.num_steps = 0

    def run(self) -> None:
        """Runs every request to its end."""
        while self._waiting or self._running:
            parts = self._schedule()
            self._harness.step(*parts)
            self.num_steps += 1
            for request in [r for r in self._running if self._harness.length(r.number) >= r.total]:
                self._running.remove(request)
                self._harness.drop(request.number)

    def _schedule(self) -> list[tuple[int, int]]:
        left = self._budget
        parts: list[tuple[int, int]] = []
        for request in self._running:
            missing = max(1, request.prompt - self._harness.length(request.number))
            count = min(missing, left)
            if count:
                parts.append((request.number, count))
                left -= count
        # Bursts between pauses, so that there are steps of pure decode too.
        if not self._running or self._random(4) == 0:
            while left and self._waiting and len(self._running) < self._harness.limits.max_num_seqs:
                request = self._admit()
                self._running.append(request)
                count = min(request.prompt - self._harness.length(request.number), left)
                parts.append((request.number, count))
                left -= count
        return parts

    def _admit(self) -> _Running:
        self._waiting -= 1
        page_size = self._harness.limits.page_size
        prompt = 1 + self._random(self._max_prompt)
        # A prefix hit shares pages of a running request. At least one token is left to compute.
        full = [(r.number, self._harness.length(r.number) // page_size) for r in self._running]
        donors = [(number, pages) for number, pages in full if pages]
        if donors and self._random(3) == 0:
            number, pages = donors[self._random(len(donors))]
            shared = min(pages, (prompt - 1) // page_size)
            if shared:
                self.num_hits += 1
                request = self._harness.add(like=number, shared_pages=shared)
                return _Running(number=request, prompt=prompt, total=prompt + 1 + self._random(self._max_answer))
        request = self._harness.add()
        return _Running(number=request, prompt=prompt, total=prompt + 1 + self._random(self._max_answer))

    def _random(self, limit: int) -> int:
        return int(torch.randint(0, limit, (), generator=self._harness.random))
