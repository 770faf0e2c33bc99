"""Finds the reference's value for each of our entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..loading import WeightMap
from .trace import Trace


class Matching:
    """Finds counterparts by name, by the names that the port declares, and by the sources of a fused projection.

    Attributes:
        used: the reference's entries that were found or excluded.
    """

    def __init__(self, theirs: Trace, weight_map: WeightMap, names: Mapping[str, str | None]) -> None:
        self._theirs = theirs
        self._weight_map = weight_map
        self._names = names
        self.used: set[str] = set()
        self._declared: set[str] = set()  # names that took effect

    def excludes(self, name: str) -> bool:
        """Whether the port declares that the reference's module of this name computes something else."""
        ending = self._ending(name)
        return ending is not None and self._names[ending] is None

    def find(self, name: str) -> torch.Tensor | str | None:
        """The reference's value [T, features], what it returned if that is not comparable, or None."""
        ending = self._ending(name)
        if ending is None:
            return self._value(name) if self._has(name) else self._fused(name)
        self._declared.add(ending)
        target = self._names[ending]
        if target is None:
            self.used.add(name)
            return None
        return self._value(name.removesuffix(ending) + target)

    def sentences(self) -> Iterator[str]:
        """The ends of sentences `declared by the port...`."""
        for ending, target in self._names.items():
            if ending not in self._declared:
                yield f", but no module has the name: {ending}"
            elif target is None:
                yield f": {ending} is not compared"
            else:
                yield f": {ending} is compared with the reference's {target}"

    def _ending(self, name: str) -> str | None:
        return next((one for one in self._names if name == one or name.endswith(f".{one}")), None)

    def _has(self, name: str) -> bool:
        return name in self._theirs.entries or name in self._theirs.unusable

    def _value(self, name: str) -> torch.Tensor | str | None:
        if not self._has(name):
            return None
        self.used.add(name)
        value = self._theirs.entries.get(name)
        return self._theirs.unusable[name] if value is None else value

    def _fused(self, name: str) -> torch.Tensor | None:
        module = name.rsplit(".", 1)[-1]
        sources = [name.removesuffix(module) + source for source in self._weight_map.fused.get(module, ())]
        values = [self._theirs.entries[source] for source in sources if source in self._theirs.entries]
        if not sources or len(values) < len(sources) or len({len(value) for value in values}) > 1:
            return None
        self.used.update(sources)
        return torch.cat(values, dim=1)
