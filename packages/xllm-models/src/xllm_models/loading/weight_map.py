"""How a model's parameters are named in checkpoints, declared as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """Where checkpoint names differ from parameter names.

    fused: a module name (one dotted component) to the checkpoint modules that make it up, in the order of its parts.
        A module with several parts that is not listed is fused in the checkpoint too: one tensor, in the same order.
    stacked: the end of a parameter's name to the checkpoint names that make up each of its entries along dimension 0
        (an expert's weights), with `{}` for the entry's number.
    tied: a checkpoint name to the parameter it shares storage with when the config ties word embeddings. It may be
        absent; one of the two names is enough; where both are present they must hold the same values.
    ignored: patterns (fnmatch) of checkpoint names that carry no weight.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def sources(self, parameter: str, num_parts: int) -> tuple[str, ...]:
        """The checkpoint names whose tensors make up `parameter`: one for each part, or one for all of them."""
        for ending, names in self.stacked.items():
            if parameter == ending or parameter.endswith("." + ending):
                before = parameter.removesuffix(ending)
                return tuple(before + name.format(index) for index in range(num_parts // len(names)) for name in names)
        components = parameter.split(".")
        for index, component in enumerate(components):
            if component in self.fused:
                return tuple(
                    ".".join((*components[:index], name, *components[index + 1 :])) for name in self.fused[component]
                )
        return (parameter,)

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)
