from __future__ import annotations

import pytest
import torch

from xllm_attention.backends.torch_backend.append import append, plan_append


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1], [0], [11], [-1, 5, -1, 0, 11, -1], [7, 6, -1], [-3, 2, -100]])
def test_writes_exactly_the_live_slots(slots: list[int]) -> None:
    cache = torch.full((3, 4, 2, 5), torch.nan)
    cache[0, 0] = 7.0
    expected = cache.clone()
    values = torch.randn(len(slots) + 2, 2, 5)  # two rows of padding
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 4, slot % 4] = values[row]
    append(plan_append(torch.tensor(slots, dtype=torch.int32), 4), values, cache)
    assert torch.equal(cache.view(torch.int32), expected.view(torch.int32))


def test_slots_at_the_end_of_int32() -> None:
    plan = plan_append(torch.tensor([2**31 - 1], dtype=torch.int32), 16)
    assert (int(plan.pages), int(plan.offsets)) == (2**27 - 1, 15)
    assert plan.pages.dtype is torch.int64
