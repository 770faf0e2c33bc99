"""`WeightMap`: maps a model's parameter names to checkpoint tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """The checkpoint names that differ from parameter names.

    fused: a module name (one dotted component) to the checkpoint modules that it fuses, in the order of its weight
        shards. A fused module that is not listed must be one tensor in the checkpoint, in the same order.
    stacked: the end of a parameter's name to the checkpoint names of each entry along dimension 0 (an expert's
        weights), with `{}` for the entry's index.
    tied: a checkpoint name to the parameter whose storage it shares if the config ties word embeddings. The checkpoint
        needs one of the two names; if it has both, they must hold the same values.
    ignored: patterns (fnmatch) of checkpoint names that are not loaded.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def sources(self, parameter: str, num_shards: int) -> tuple[str, ...]:
        """The checkpoint names of `parameter`'s tensors: one per weight shard, or one for all of them."""
        for ending, names in self.stacked.items():
            if parameter == ending or parameter.endswith("." + ending):
                before = parameter.removesuffix(ending)
                return tuple(before + name.format(index) for index in range(num_shards // len(names)) for name in names)
        components = parameter.split(".")
        for index, component in enumerate(components):
            if component in self.fused:
                return tuple(
                    ".".join((*components[:index], name, *components[index + 1 :])) for name in self.fused[component]
                )
        return (parameter,)

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)
