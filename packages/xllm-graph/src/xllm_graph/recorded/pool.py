"""The shared memory pool of recorded graphs: blocks that are reused once no tensor of the capture refers to them.

Poison in a block stands for the data that another graph leaves in shared memory.
"""

from __future__ import annotations

import weakref

import torch

from ..memory import bytes_of, shaped_as, span

_ALIGNMENT = 64  # bytes; a block can then be viewed as any dtype


class Block:
    """One piece of the pool's memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.address = self.memory.data_ptr()
        self.num_bytes = num_bytes
        self.in_use = False
        self.dtype = torch.uint8  # of the last tensor that used the block
        self.dirty = False  # written since it was last poisoned

    def allocate(self) -> torch.Tensor:
        """The block's bytes as a tensor; the block is free again when the last tensor over its storage is gone."""
        lease = span(self.address, self.num_bytes, self.memory.device)
        self.in_use = True
        weakref.finalize(lease, self._returned).atexit = False
        return bytes_of(lease)

    def poison(self) -> None:
        """Fills the block with NaN, or with large integers where the last tensor held integers."""
        poison(self.memory, self.dtype)
        self.dirty = False

    def _returned(self) -> None:
        self.in_use = False


class BlockPool:
    """Blocks on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[int, Block] = {}  # by address

    @property
    def num_bytes(self) -> int:
        """Memory of all blocks."""
        return sum(block.num_bytes for block in self._blocks.values())

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s dtype and layout in the smallest free block that holds it; its values are undefined."""
        wanted = like.untyped_storage().nbytes()
        free = [block for block in self._blocks.values() if not block.in_use and block.num_bytes >= wanted]
        block = min(free, key=lambda block: block.num_bytes, default=None)
        if block is None:
            block = Block(-(-wanted // _ALIGNMENT) * _ALIGNMENT, self._device)
            self._blocks[block.address] = block
        block.dtype = like.dtype
        return shaped_as(block.allocate(), like)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that the tensor lies in; None for memory of others."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def addresses_in_use(self) -> frozenset[int]:
        """Addresses of the blocks that live tensors use."""
        return frozenset(address for address, block in self._blocks.items() if block.in_use)

    def poison_except(self, kept: frozenset[int]) -> None:
        """Overwrites every block but those at the addresses `kept`."""
        for address, block in self._blocks.items():
            if block.dirty and address not in kept:
                block.poison()


def poison(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Fills a contiguous tensor with bytes that read as NaN in a floating `dtype` (the tensor's by default), else as
    large integers."""
    dtype = dtype or tensor.dtype
    tensor.view(torch.uint8).fill_(0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F)
