"""Whether two strided tensors share memory. Owns no state."""

from __future__ import annotations

import torch


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether some element of one tensor has the address of an element of the other.

    Interleaved views of one buffer do not, although their ranges of addresses overlap. Exact for tensors of one dtype
    and of equal strides whose own elements do not overlap; other tensors count as sharing when their ranges overlap.
    """
    distance = second.data_ptr() - first.data_ptr()
    size = first.element_size()
    if first.stride() != second.stride() or size != second.element_size() or distance % size:
        return distance < _bytes(first) and -distance < _bytes(second)
    # Index i of the first tensor and j of the second have one address if (i - j) . strides is the distance. Each
    # difference d of a dimension satisfies -size_of_second < d < size_of_first.
    dimensions = sorted(zip(first.stride(), first.shape, second.shape, strict=True), reverse=True)
    return _reachable(distance // size, [(stride, -(b - 1), a - 1) for stride, a, b in dimensions if (a, b) != (1, 1)])


def _reachable(distance: int, dimensions: list[tuple[int, int, int]]) -> bool:
    """Whether sum(d * stride) can be the distance, with each d between its limits; strides fall."""
    if not dimensions:
        return distance == 0
    (stride, least, most), rest = dimensions[0], dimensions[1:]
    # What the other dimensions can reach decides which d of this one can still lead to the distance.
    low = sum(stride * limits[0] for stride, *limits in rest)
    high = sum(stride * limits[1] for stride, *limits in rest)
    if stride == 0:
        return _reachable(distance, rest)
    first = max(least, -((high - distance) // stride))
    last = min(most, (distance - low) // stride)
    return any(_reachable(distance - d * stride, rest) for d in range(first, last + 1))


def _bytes(tensor: torch.Tensor) -> int:
    """Size of the tensor's range of addresses."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.element_size()
