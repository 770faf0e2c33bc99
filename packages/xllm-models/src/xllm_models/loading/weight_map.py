"""How a model's parameters are named in checkpoints, declared as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """Where checkpoint names differ from parameter names.

    fused: a module name (one dotted component) to the checkpoint modules that make it up, in the order of its parts.
    tied: a checkpoint name to the parameter it shares storage with when the config ties word embeddings. It may be
        absent; one of the two names is enough; where both are present they must hold the same values.
    ignored: patterns (fnmatch) of checkpoint names that carry no weight.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def sources(self, parameter: str) -> tuple[str, ...]:
        """The checkpoint names whose tensors make up `parameter`, one for each of its parts."""
        components = parameter.split(".")
        for index, component in enumerate(components):
            if component in self.fused:
                return tuple(
                    ".".join((*components[:index], name, *components[index + 1 :])) for name in self.fused[component]
                )
        return (parameter,)

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)
