"""Writes and reads traces: safetensors files with the tokens in the header."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .trace import Trace


def write_dump(trace: Trace, path: Path) -> None:
    """Write a trace; its directory must exist."""
    # safetensors does not keep the order of entries, so each name begins with its index.
    entries = {f"{index:05d} {name}": value.contiguous() for index, (name, value) in enumerate(trace.entries.items())}
    save_file(entries, path, metadata={"token_ids": json.dumps(trace.token_ids)})


def read_dump(path: Path) -> Trace:
    """Read a dump. FileNotFoundError if it does not exist, ValueError if it is another kind of file."""
    if not path.is_file():
        raise FileNotFoundError(f"dump {path} does not exist")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if "token_ids" not in metadata:
                raise ValueError(f"{path} is not a dump of a comparison: its header has no token_ids")
            names = sorted(file.keys())
            entries = {name.split(" ", 1)[-1]: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a dump of a comparison: {error}") from error
    return Trace(token_ids=tuple(json.loads(metadata["token_ids"])), entries=entries)
