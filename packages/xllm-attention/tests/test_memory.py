"""Which views of one buffer share memory, against sets of addresses."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_attention.memory import share_memory

BUFFER = torch.zeros(4096)


def addresses(tensor: torch.Tensor) -> set[int]:
    """The offset of every element in its storage."""
    offsets = torch.tensor(tensor.storage_offset())
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dim] = size
        offsets = offsets + (torch.arange(size) * stride).view(shape)
    return set(offsets.flatten().tolist())


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of equal strides, whose elements do not overlap in themselves, with gaps between rows."""
    stride, strides = 1, []
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    for size in sizes:
        stride *= draw(st.integers(1, 3)) if strides else 1
        strides.append(stride)
        stride *= size
    other = [draw(st.integers(1, size)) for size in sizes]
    order = draw(st.permutations(range(len(sizes))))

    def view(shape: list[int]) -> torch.Tensor:
        offset = draw(st.integers(0, 40))
        return BUFFER.as_strided([shape[i] for i in order], [strides[i] for i in order], offset)

    return view(sizes), view(other)


@settings(max_examples=400, deadline=None)
@given(views())
def test_equal_strides_are_exact(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    first, second = pair
    expected = bool(addresses(first) & addresses(second))
    assert share_memory(first, second) == share_memory(second, first) == expected


def test_layouts_of_caches() -> None:
    pages = torch.zeros(6, 2, 4, 2, 8)  # [page, k or v, token, head, dim]
    assert not share_memory(pages[:, 0], pages[:, 1])
    assert share_memory(pages[:, 0], pages[:, 0])
    assert share_memory(pages[1:, 0], pages[:-1, 0])
    assert not share_memory(pages[0], pages[1])
    assert share_memory(pages[:, 0], pages[:, 0].transpose(1, 2))  # other strides in one range
    assert not share_memory(torch.zeros(4), torch.zeros(4))
