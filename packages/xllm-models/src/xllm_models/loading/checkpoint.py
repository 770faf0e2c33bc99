"""Opens the weight files of a checkpoint directory: one safetensors file, or the files that an index lists."""

from __future__ import annotations

import json
from pathlib import Path

from .state_dict import SafetensorsStateDict

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_checkpoint(directory: Path) -> list[SafetensorsStateDict]:
    """Open a directory's weights. With an index, only the tensors that it lists are visible.

    FileNotFoundError if there are no weights or listed files do not exist (it names them all), ValueError for an index
    or a file that cannot be read.
    """
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise FileNotFoundError(f"model directory {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [SafetensorsStateDict(directory / SINGLE_FILE)]
    shards = _read_index(index_path)
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{index_path} lists weight files that do not exist: {', '.join(missing)}")
    return [SafetensorsStateDict(directory / name, tensors) for name, tensors in shards.items()]


def _read_index(path: Path) -> dict[str, list[str]]:
    """File name to the names of its tensors."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors index with a weight_map: {error!r}") from error
    shards: dict[str, list[str]] = {}
    for tensor, file in entries.items():
        if Path(file).name != file:
            raise ValueError(f"{path} lists {file!r}, which is not a file of its directory")
        shards.setdefault(file, []).append(tensor)
    return shards
