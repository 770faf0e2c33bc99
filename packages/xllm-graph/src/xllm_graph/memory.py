"""Makes tensors over memory that they do not own. The caller keeps the memory mapped."""

from __future__ import annotations

import ctypes

import torch

SERVED_DEVICES = ("cpu", "cuda")


class DeviceSpan:
    """A range of CUDA memory in the form that `torch.as_tensor` takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "strides": None, "version": 2,
        }  # fmt: skip


def span(address: int, num_bytes: int, device: torch.device) -> object:
    """An object that names `num_bytes` bytes at `address`; `bytes_of` makes a tensor of it that keeps it alive."""
    if device.type == "cpu":
        return (ctypes.c_uint8 * num_bytes).from_address(address)
    return DeviceSpan(address, num_bytes)


def bytes_of(owner: object) -> torch.Tensor:
    """The memory of a `span` as a uint8 tensor, whose storage holds the only reference to `owner` that it needs."""
    if isinstance(owner, DeviceSpan):
        return torch.as_tensor(owner)
    return torch.frombuffer(owner, dtype=torch.uint8)


def shaped_as(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The bytes `raw` with the dtype, shape, strides and offset of `like`."""
    whole = raw.numel() // like.element_size() * like.element_size()
    typed = raw[:whole].view(like.dtype)
    return typed.as_strided(like.shape, like.stride(), like.storage_offset())


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, dtype and layout as `tensor`, without keeping it allocated."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor
    return shaped_as(bytes_of(span(storage.data_ptr(), storage.nbytes(), tensor.device)), tensor)
