"""Reads config.json of a checkpoint directory, and the files that some exporters write next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .keys import ConfigKeys
from .text import text_config


def read_config(directory: Path) -> dict[str, Any]:
    """The text model's keys of config.json (see `text_config`), with the eos ids of generation_config.json added.

    Older versions of ModelOpt describe the quantization in hf_quant_config.json only; it becomes `quantization_config`.

    FileNotFoundError if the directory or config.json does not exist, ValueError if it is not a JSON object.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"model directory {directory} does not exist")
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"model directory {directory} has no config.json")
    raw = text_config(_read_json(path))
    generation_path = directory / "generation_config.json"
    if generation_path.is_file():
        # Chat models often end a turn with tokens that only the generation config lists.
        more = ConfigKeys(_read_json(generation_path), str(generation_path)).integers("eos_token_id")
        ids = (*ConfigKeys(raw).integers("eos_token_id"), *more)
        raw["eos_token_id"] = list(dict.fromkeys(ids)) or None
    quantization_path = directory / "hf_quant_config.json"
    if quantization_path.is_file() and not raw.get("quantization_config"):
        found = ConfigKeys(_read_json(quantization_path), str(quantization_path)).mapping("quantization")
        raw["quantization_config"] = {"quant_method": "modelopt", **found}
    return raw


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw
