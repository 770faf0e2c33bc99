"""Shows the tensors of a checkpoint under the family's names: without the prefixes of a weight map, and renamed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from .loader import WeightError
from .state_dict import SafetensorsStateDict, SliceableStateDict, StateDict, TensorSlice
from .weight_map import WeightMap


def without_prefixes(state_dicts: Sequence[StateDict], weight_map: WeightMap) -> Sequence[StateDict]:
    """The state dicts under the family's names. A state dict that has only such names is returned as it is.

    WeightError if two tensors of one state dict have the same name then. The loader refuses the
    same name in two state dicts.
    """
    return [_renamed(state_dict, weight_map) for state_dict in state_dicts]


def _renamed(state_dict: StateDict, weight_map: WeightMap) -> StateDict:
    stored: dict[str, list[str]] = {}
    for name in list(state_dict.keys()):
        stored.setdefault(weight_map.family_name(name), []).append(name)
    twice = [f"{' and '.join(sorted(names))} (both are {name})" for name, names in stored.items() if len(names) > 1]
    if twice:
        raise WeightError(f"the checkpoint has tensors in two spellings: {', '.join(sorted(twice))}")
    names = {name: found[0] for name, found in stored.items()}
    if all(name == found for name, found in names.items()):
        return state_dict
    if isinstance(state_dict, SafetensorsStateDict):
        return state_dict.renamed(names)
    if isinstance(state_dict, SliceableStateDict):
        return _SliceableRenamed(state_dict, names)
    return _Renamed(state_dict, names)


class _Renamed:
    """A state dict under other names; `names` maps each to the stored one."""

    def __init__(self, stored: StateDict, names: Mapping[str, str]) -> None:
        self._stored = stored
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._stored.get_tensor(self._names[name])

    def keys(self) -> Collection[str]:
        return self._names.keys()


class _SliceableRenamed(_Renamed):
    def __init__(self, stored: SliceableStateDict, names: Mapping[str, str]) -> None:
        super().__init__(stored, names)
        self._sliceable = stored

    def get_slice(self, name: str) -> TensorSlice:
        return self._sliceable.get_slice(self._names[name])
