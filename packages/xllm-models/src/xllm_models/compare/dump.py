"""Writes and reads traces: safetensors files with the tokens, and all that is not a tensor, in the header."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .routing import Choice
from .trace import Trace

_EXPERTS, _SCORES = "experts of ", "scores of "  # beginnings of names; an entry's name begins with a number


def write_dump(trace: Trace, path: Path) -> None:
    """Write a trace; its directory must exist. Flips and the routers' inputs are not written."""
    # safetensors does not keep the order of entries, so each name begins with its index.
    tensors = {f"{index:05d} {name}": value.contiguous() for index, (name, value) in enumerate(trace.entries.items())}
    tensors |= {_EXPERTS + name: choice.experts.contiguous() for name, choice in trace.choices.items()}
    scores = {name: choice.scores for name, choice in trace.choices.items()}
    tensors |= {_SCORES + name: value.contiguous() for name, value in scores.items() if value is not None}
    metadata = {
        "token_ids": trace.token_ids,
        "num_experts": {name: choice.num_experts for name, choice in trace.choices.items()},
        "unusable": trace.unusable,
        "weighted": trace.weighted,
    }
    save_file(tensors, path, metadata={key: json.dumps(value) for key, value in metadata.items()})


def read_dump(path: Path) -> Trace:
    """Read a dump. FileNotFoundError if it does not exist, ValueError if it is another kind of file."""
    if not path.is_file():
        raise FileNotFoundError(f"dump {path} does not exist")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if "token_ids" not in header:
                raise ValueError(f"{path} is not a dump of a comparison: its header has no token_ids")
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a dump of a comparison: {error}") from error
    metadata = {
        key: json.loads(header.get(key, "null")) for key in ("token_ids", "num_experts", "unusable", "weighted")
    }
    return Trace(
        token_ids=tuple(metadata["token_ids"]),
        entries={name.split(" ", 1)[-1]: value for name, value in tensors.items() if name[0].isdigit()},
        choices={
            name: Choice(experts=tensors[_EXPERTS + name], num_experts=number, scores=tensors.get(_SCORES + name))
            for name, number in (metadata["num_experts"] or {}).items()
        },
        unusable=metadata["unusable"] or {},
        weighted=tuple(metadata["weighted"] or ()),
    )
