"""`WeightMap`: maps a model's parameter names to checkpoint tensor names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

# Buffers of older transformers versions. They are computed from the config here, as transformers does now.
_ALWAYS_IGNORED = ("*.rotary_emb.inv_freq",)

_TOP_LEVEL = ("model", "lm_head")  # the modules of every CausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """The checkpoint names that differ from parameter names.

    prefix: beginnings of checkpoint names, each with its last dot, under which a checkpoint of several models (vision,
        audio) keeps the text model. The rest of such a name is a name of this family, or that without its `model.`:
        `language_model.` stands before `model.layers.` and `lm_head.`, `model.language_model.` before `layers.`. Names
        with no prefix are unchanged, so one map reads every spelling. All other fields have the names without a prefix.
    fused: a module name (one dotted component) to the checkpoint modules that it fuses, in the order of its weight
        shards. A fused module that is not listed must be one tensor in the checkpoint, in the same order.
    stacked: the end of a parameter's name to the checkpoint names of each entry along dimension 0 (an expert's
        weights), with `{}` for the entry's index.
    tied: a checkpoint name to the parameter whose storage it shares if the config ties word embeddings. The checkpoint
        needs one of the two names; if it has both, they must hold the same values.
    ignored: patterns (fnmatch) of checkpoint names that are not loaded, such as those of a vision tower. The log counts
        them. `*.rotary_emb.inv_freq` is always ignored.
    """

    prefix: str | tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for prefix in self._prefixes():
            if len(prefix) < 2 or not prefix.endswith("."):
                raise ValueError(f"WeightMap prefix {prefix!r} must be a module's name and a dot")

    def _prefixes(self) -> tuple[str, ...]:
        """Longest first: `language_model.model.` before `language_model.`."""
        given = (self.prefix,) if isinstance(self.prefix, str) else self.prefix
        return tuple(sorted(given, key=len, reverse=True))

    def without_prefix(self, name: str) -> str:
        """The family's name of a checkpoint tensor, or of a module of the model that wrote it."""
        for prefix in self._prefixes():
            if name == prefix[:-1]:
                return "model"
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                return rest if rest.partition(".")[0] in _TOP_LEVEL else f"model.{rest}"
        return name

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
        return any(fnmatchcase(name, pattern) for pattern in (*_ALWAYS_IGNORED, *self.ignored))

    def count_ignored(self, names: Iterable[str]) -> dict[str, int]:
        """The number of `names` by the first pattern of `ignored` that each matches."""
        matches = [next((one for one in self.ignored if fnmatchcase(name, one)), None) for name in names]
        return {pattern: matches.count(pattern) for pattern in self.ignored if pattern in matches}
