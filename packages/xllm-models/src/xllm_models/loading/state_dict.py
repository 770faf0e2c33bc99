"""State dicts, the sources of weights: named tensors, which a source may read slice by slice.

Owns the protocols and two implementations: tensors in memory and a safetensors file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open


class StateDict(Protocol):
    """Named tensors, as a checkpoint or a serving framework offers them."""

    def has(self, name: str) -> bool: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def keys(self) -> Iterable[str]: ...


class TensorSlice(Protocol):
    """A lazy tensor: indexing it reads that region only."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...  # safetensors' name: F32, BF16, ...

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor: ...


@runtime_checkable
class SliceableStateDict(StateDict, Protocol):
    """A state dict that can also read a region of a tensor."""

    def get_slice(self, name: str) -> TensorSlice: ...


class DictStateDict:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def keys(self) -> Collection[str]:
        return self._tensors.keys()


class SafetensorsStateDict:
    """A memory-mapped safetensors file; `names` restricts it to the tensors that an index lists.

    ValueError for a truncated file, one that is not safetensors, and one without a tensor of `names`.
    """

    def __init__(self, path: Path, names: Iterable[str] | None = None) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"weight file {path} does not exist")
        try:
            self._file = cast(Any, safe_open(path, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise ValueError(f"weight file {path} is truncated or not a safetensors file: {error}") from error
        present = {name: name for name in self._file.keys()}  # noqa: SIM118  safetensors' file is no mapping
        self._names = present if names is None else {name: name for name in names}  # name: that in the file
        absent = [name for name in self._names if name not in present]
        if absent:
            raise ValueError(f"weight file {path} lacks tensors that the index lists for it: {', '.join(absent)}")

    def renamed(self, names: Mapping[str, str]) -> SafetensorsStateDict:
        """The same mapped file under other names; `names` maps each of them to the name in this state dict."""
        other = copy(self)
        other._names = {name: self._names[stored] for name, stored in names.items()}
        return other

    def has(self, name: str) -> bool:
        return name in self._names

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(self._names[name])
        return tensor

    def get_slice(self, name: str) -> TensorSlice:
        tensor_slice: TensorSlice = self._file.get_slice(self._names[name])
        return tensor_slice

    def keys(self) -> Collection[str]:
        return self._names.keys()


class ReadOnce:
    """A state dict that asks its source for each tensor once: a serving framework's `get_tensor` may be costly.

    It keeps the tensors as long as it exists, so the source should return views of memory that it holds anyway.
    """

    def __init__(self, source: StateDict) -> None:
        self._source = source
        self._names = tuple(source.keys())
        self._read: dict[str, torch.Tensor] = {}

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        if name not in self._read:
            self._read[name] = self._source.get_tensor(name)
        return self._read[name]

    def keys(self) -> Collection[str]:
        return self._names


def read_once(state_dicts: Iterable[StateDict]) -> list[StateDict]:
    """The state dicts, with `ReadOnce` around those that cannot read a region of a tensor."""
    return [one if isinstance(one, SliceableStateDict) else ReadOnce(one) for one in state_dicts]


def shape_and_dtype(state_dict: StateDict, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype name of a tensor; a sliceable state dict does not read it for that."""
    if isinstance(state_dict, SliceableStateDict):
        tensor_slice = state_dict.get_slice(name)
        return tuple(tensor_slice.get_shape()), tensor_slice.get_dtype()
    tensor = state_dict.get_tensor(name)
    return tuple(tensor.shape), str(tensor.dtype)


def tensor_region(state_dict: StateDict, name: str, region: tuple[slice, ...]) -> torch.Tensor:
    """A region of a tensor; a sliceable state dict reads no more than that."""
    if isinstance(state_dict, SliceableStateDict):
        return state_dict.get_slice(name)[region]
    return state_dict.get_tensor(name)[region]


@dataclass(frozen=True, slots=True)
class PlainSlice:
    """A tensor of any state dict as a `TensorSlice`."""

    own: StateDict
    name: str

    def get_shape(self) -> list[int]:
        return list(shape_and_dtype(self.own, self.name)[0])

    def get_dtype(self) -> str:
        return shape_and_dtype(self.own, self.name)[1]

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        return tensor_region(self.own, self.name, region)
