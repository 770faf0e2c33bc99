"""`WeightMap`: maps a model's parameter names to checkpoint tensor names."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

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
    renamed: a module name of the checkpoint (one dotted component) to the family's name for it, for example Mixtral's
        `block_sparse_moe` to `mlp`, which transformers 5 calls it. All fields below have the family's names.
    stacked: the end of a parameter's name to the checkpoint names of each entry along dimension 0 (an expert's
        weights), with `{}` for the entry's index.
    prestacked: the end of a parameter's name to the checkpoint tensors that hold all entries along dimension 0. A
        tensor holds an equal share of each entry's weight shards, concatenated along dimension 1. They are read if the
        checkpoint has one of them, and the names of `stacked` otherwise.
    transposed: patterns (fnmatch) of checkpoint tensors whose last two dimensions are (inputs, outputs). Biases stay.
    interleaved: patterns of checkpoint tensors whose outputs alternate between the rows of two weight shards (gate row,
        up row, gate row, ...). A name that ends in `bias` has its outputs in the last dimension.
    tied: a checkpoint name to the parameter whose storage it shares if the config ties word embeddings. The checkpoint
        needs one of the two names; if it has both, they must hold the same values.
    ignored: patterns (fnmatch) of checkpoint names that are not loaded, such as those of a vision tower. The log counts
        them. `{num_layers}` stands for the model's number of layers, which is the index of a multi-token prediction
        layer after the last layer. Tensors that have no effect in any family need no pattern (`no_effect`).
    """

    prefix: str | tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prestacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ()
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

    def family_name(self, name: str) -> str:
        """The family's name of a checkpoint tensor, or of a module of the model that wrote it."""
        bare = self._without_prefix(name)
        return (
            ".".join(self.renamed.get(component, component) for component in bare.split(".")) if self.renamed else bare
        )

    def _without_prefix(self, name: str) -> str:
        for prefix in self._prefixes():
            if name == prefix[:-1]:
                return "model"
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                return rest if rest.partition(".")[0] in _TOP_LEVEL else f"model.{rest}"
        return name

    def prestacked_sources(self, parameter: str, present: Container[str]) -> tuple[str, ...]:
        """The checkpoint tensors that hold all entries of `parameter`; () if none of them is `present`."""
        before, names = _of_ending(parameter, self.prestacked)
        found = tuple(before + name for name in names)
        return found if any(name in present for name in found) or not _of_ending(parameter, self.stacked)[1] else ()

    def sources(self, parameter: str, num_shards: int) -> tuple[str, ...]:
        """The checkpoint names of `parameter`'s tensors: one per weight shard, or one for all of them."""
        before, names = _of_ending(parameter, self.stacked)
        if names:
            return tuple(before + name.format(index) for index in range(num_shards // len(names)) for name in names)
        components = parameter.split(".")
        for index, component in enumerate(components):
            if component in self.fused:
                return tuple(
                    ".".join((*components[:index], name, *components[index + 1 :])) for name in self.fused[component]
                )
        return (parameter,)

    def for_num_layers(self, num_layers: int) -> WeightMap:
        """The map with `{num_layers}` in the patterns of `ignored` replaced."""
        number = str(num_layers)
        return replace(self, ignored=tuple(one.replace("{num_layers}", number) for one in self.ignored))

    def ignores(self, name: str) -> bool:
        return matches(name, self.ignored)

    def count_ignored(self, names: Iterable[str]) -> dict[str, int]:
        """The number of `names` by the first pattern of `ignored` that each matches."""
        matches = [next((one for one in self.ignored if fnmatchcase(name, one)), None) for name in names]
        return {pattern: matches.count(pattern) for pattern in self.ignored if pattern in matches}


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _of_ending(parameter: str, by_ending: Mapping[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    """The beginning of the parameter's name, and the names for its ending; ("", ()) without one."""
    for ending, names in by_ending.items():
        if parameter == ending or parameter.endswith("." + ending):
            return parameter.removesuffix(ending), names
    return "", ()
