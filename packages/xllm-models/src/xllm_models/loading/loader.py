"""Strict loading: every parameter set exactly once, every checkpoint tensor used, nothing written on a mismatch.

Owns the matching of a module's parameters and persistent buffers with state dicts, and the copies. Names come from the
weight map, shapes and shards from the layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from tqdm import tqdm

from ..config import ModelConfig
from ..layers.parallel import ShardedModule, WeightShard, whole_shard
from .no_effect import faults_of_unexpected
from .state_dict import SafetensorsStateDict, SliceableStateDict, StateDict, shape_and_dtype, tensor_region
from .weight_map import WeightMap

# In PyTorch's and in safetensors' spelling. Integer and fp8 tensors are refused: they need a scale.
_FLOAT_DTYPES = frozenset(
    {"torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "F64", "F32", "F16", "BF16"}
)

# The dtypes of integer buffers, which are not converted, in the same two spellings.
_INTEGER_DTYPES = {
    torch.int64: ("torch.int64", "I64"),
    torch.int32: ("torch.int32", "I32"),
    torch.uint8: ("torch.uint8", "U8"),
    torch.bool: ("torch.bool", "BOOL"),
}

_PIECE_BYTES = 4 << 20  # of a piece in fp32
_PIECE_ROWS = 8  # a piece is a multiple of 8 rows, which quantized formats pack together


class WeightError(ValueError):
    """The checkpoint does not fit the model; the message lists every such tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One copy from a region of a checkpoint tensor to a region of a parameter or buffer."""

    source: str
    parameter: torch.Tensor  # the whole parameter or buffer
    shard: WeightShard


def load_weights(
    module: nn.Module,
    weight_map: WeightMap,
    state_dicts: Sequence[StateDict],
    *,
    tied: bool,
    config: ModelConfig | None = None,
    progress: bool = False,
) -> None:
    """Copy the checkpoint into the module's parameters and persistent buffers, converting to their dtype and device.

    The parameters keep their storage, so a captured graph stays valid. `tied`: the map's tied names share storage.
    With a `config`, tensors that have no effect under it (`no_effect`) need not be in the model.
    One WeightError, raised before anything is written, lists all missing, unexpected and duplicate tensors, and those
    of a wrong shape or dtype. `progress` shows a progress bar on stderr.
    """
    where = {name: state_dict for state_dict in state_dicts for name in list(state_dict.keys())}
    aliases = weight_map.tied if tied else {}
    # A checkpoint may hold a tied tensor under either name.
    stands_for = {name: alias for alias, name in aliases.items() if name not in where and alias in where}
    copies = [
        _Copy(source=stands_for.get(copy.source, copy.source), parameter=copy.parameter, shard=copy.shard)
        for copy in _copies(module, weight_map, where)
    ]
    counts = Counter(name for state_dict in state_dicts for name in list(state_dict.keys()))
    unexpected = [name for name in _unexpected(copies, aliases, where) if not weight_map.ignores(name)]
    with_effect: list[str] = []
    if config is not None:
        unexpected, with_effect = faults_of_unexpected(unexpected, where, module, config)
    twice = [name for name, count in counts.items() if count > 1]
    others = {"unexpected": unexpected, "would have an effect": with_effect, "in more than one file": twice}
    _check(copies, aliases, where, others)
    for alias, name in aliases.items():
        _check_tied(alias, name, copies, where)
    _clear_padding(copies)
    for copy in tqdm(copies, desc="loading weights", unit="tensor", disable=not progress):
        _fill(copy, where[copy.source])


def _copies(module: nn.Module, weight_map: WeightMap, present: Container[str]) -> Iterator[_Copy]:
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, parameter in _loaded_tensors(owner):
            if id(parameter) in seen:  # a tied head shares the embedding's parameter
                continue
            seen.add(id(parameter))
            full_name = f"{prefix}.{name}" if prefix else name
            shards = owner.weight_shards(name) if isinstance(owner, ShardedModule) else (whole_shard(parameter),)
            storage = parameter.detach()
            for source, shard in _sources(weight_map, full_name, shards, present):
                yield _Copy(source=source, parameter=storage, shard=shard)


def _sources(
    weight_map: WeightMap, parameter: str, shards: tuple[WeightShard, ...], present: Container[str]
) -> Iterable[tuple[str, WeightShard]]:
    """The checkpoint name of each shard, and the shard as a region of that tensor."""
    if prestacked := weight_map.prestacked_sources(parameter, present):
        return _of_prestacked(parameter, prestacked, shards)
    sources = weight_map.sources(parameter, len(shards))
    if len(sources) == 1 and len(shards) > 1:
        sources, shards = sources * len(shards), _within_one_tensor(shards)
    if len(shards) != len(sources):
        raise ValueError(
            f"parameter {parameter} has {len(shards)} weight shards, but the weight map names {list(sources)} for it"
        )
    return zip(sources, shards, strict=True)


def _of_prestacked(
    parameter: str, sources: tuple[str, ...], shards: tuple[WeightShard, ...]
) -> Iterator[tuple[str, WeightShard]]:
    """The shards of a stacked parameter as regions of tensors that hold all its entries along dimension 0."""
    entries = [list(group) for _, group in groupby(shards, lambda shard: shard.target[0].start)]
    if any(len(group) % len(sources) for group in entries):
        raise ValueError(
            f"an entry of parameter {parameter} has {len(entries[0])} weight shards, "
            f"but the weight map names {list(sources)} for it"
        )
    for entry, group in enumerate(entries):
        size = len(group) // len(sources)
        for index, source in enumerate(sources):
            for shard in _within_one_tensor(group[index * size : (index + 1) * size]):
                shape, region = (len(entries), *shard.shape), (slice(entry, entry + 1), *shard.source)
                yield source, WeightShard(shape=shape, source=region, target=shard.target)


def _within_one_tensor(shards: Sequence[WeightShard]) -> tuple[WeightShard, ...]:
    """The shards of a parameter whose sources are one tensor in the checkpoint, concatenated along dimension 0."""
    total = sum(shard.shape[0] for shard in shards)
    offset, found = 0, []
    for shard in shards:
        rows = slice(shard.source[0].start + offset, shard.source[0].stop + offset)
        found.append(
            WeightShard(shape=(total, *shard.shape[1:]), source=(rows, *shard.source[1:]), target=shard.target)
        )
        offset += shard.shape[0]
    return tuple(found)


def _loaded_tensors(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    yield from owner.named_parameters(recurse=False)
    for name, buffer in owner.named_buffers(recurse=False):
        if name not in owner._non_persistent_buffers_set:
            yield name, buffer


def _unexpected(copies: Sequence[_Copy], aliases: Mapping[str, str], where: Mapping[str, StateDict]) -> list[str]:
    """The checkpoint tensors that no parameter is loaded from."""
    expected = {copy.source for copy in copies}
    expected |= {alias for alias, name in aliases.items() if name in expected}
    return [name for name in where if name not in expected]


def _check(
    copies: Sequence[_Copy],
    aliases: Mapping[str, str],
    where: Mapping[str, StateDict],
    others: Mapping[str, list[str]],
) -> None:
    """Raise one WeightError that lists every tensor that does not fit and the faults `others`, if any."""
    expected = {copy.source: copy.shard.shape for copy in copies}
    integers = {copy.source: copy.parameter.dtype for copy in copies if not copy.parameter.is_floating_point()}
    expected |= {alias: expected[name] for alias, name in aliases.items() if name in expected and alias in where}
    missing = [name for name in expected if name not in where]
    faults = {"missing": missing, **others, "wrong shape": [], "wrong dtype": []}
    for name, shape in expected.items():
        if name not in where:
            continue
        found, dtype = shape_and_dtype(where[name], name)
        if found != shape:
            faults["wrong shape"].append(f"{name} (checkpoint {list(found)}, model {list(shape)})")
        if dtype not in (_INTEGER_DTYPES.get(integers[name], ()) if name in integers else _FLOAT_DTYPES):
            faults["wrong dtype"].append(f"{name} ({dtype})")
    lines = [f"  {kind}: {', '.join(sorted(names))}" for kind, names in faults.items() if names]
    if lines:
        raise WeightError("\n".join(("the checkpoint does not fit the model", *lines)))


def _is_whole(shard: WeightShard) -> bool:
    return all(region == slice(0, size) for region, size in zip(shard.source, shard.shape, strict=True))


def _read(state_dict: StateDict, name: str, shard: WeightShard) -> torch.Tensor:
    """The shard's region of a checkpoint tensor."""
    return state_dict.get_tensor(name) if _is_whole(shard) else tensor_region(state_dict, name, shard.source)


def _fill(copy: _Copy, state_dict: StateDict) -> None:
    """Write the shard into its region of the parameter.

    A sliced, converted or dequantized tensor takes extra memory, so it is copied in pieces of some rows. A whole tensor
    of a safetensors file does not: it is the mapped file.
    """
    target = copy.parameter[copy.shard.target]
    while target.ndim > len(copy.shard.source):
        target = target[0]  # one entry of stacked weights
    if (
        not copy.shard.source
        or not isinstance(state_dict, SliceableStateDict)
        or (_is_whole(copy.shard) and isinstance(state_dict, SafetensorsStateDict))
    ):
        target.copy_(_read(state_dict, copy.source, copy.shard))
        return
    tensor = state_dict.get_slice(copy.source)
    region = copy.shard.source
    sizes = [one.stop - one.start for one in region]
    dim = next((index for index, size in enumerate(sizes) if size != 1), 0)  # that of the rows of one entry, if stacked
    step = max(_PIECE_BYTES // (4 * math.prod(sizes[dim + 1 :])) // _PIECE_ROWS, 1) * _PIECE_ROWS
    for start in range(0, sizes[dim], step):
        size = min(step, sizes[dim] - start)
        rows = slice(region[dim].start + start, region[dim].start + start + size)
        target.narrow(dim, start, size).copy_(tensor[(*region[:dim], rows, *region[dim + 1 :])])


def _check_tied(alias: str, name: str, copies: Sequence[_Copy], where: Mapping[str, StateDict]) -> None:
    """Refuse a checkpoint whose two names of one tied tensor hold different values (in this rank's shard)."""
    if alias not in where or name not in where:
        return
    shard = next(copy.shard for copy in copies if copy.source == name)
    if not torch.equal(_read(where[alias], alias, shard), _read(where[name], name, shard)):
        raise WeightError(f"the config ties word embeddings, but {alias} and {name} hold different values")


def _clear_padding(copies: Sequence[_Copy]) -> None:
    """Zero the parameters whose shards leave rows unset (a padded vocabulary)."""
    parameters = {id(copy.parameter): copy.parameter for copy in copies}
    num_set: Counter[int] = Counter()
    for copy in copies:
        num_set[id(copy.parameter)] += copy.parameter[copy.shard.target].numel()
    for key, parameter in parameters.items():
        if num_set[key] < parameter.numel():
            parameter.zero_()
