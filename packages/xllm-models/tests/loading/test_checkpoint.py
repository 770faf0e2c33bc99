"""Checkpoint directories: one file, an index with shards, and files that are missing or broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xllm_models import load_model
from xllm_models.loading import SafetensorsStateDict, open_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(write_checkpoint: Callable[..., Any]) -> Path:
    path: Path = write_checkpoint("llama")[1]
    return path


def shard(directory: Path) -> dict[str, str]:
    """Split the single file in two with an index; returns the index's weight map."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number}-of-2.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors").unlink()
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_load_as_one_file_does(directory: Path) -> None:
    want = load_model(directory)
    shard(directory)
    got = load_model(directory)
    assert all(torch.equal(x, y) for x, y in zip(got.parameters(), want.parameters(), strict=True))


def test_the_index_is_an_allowlist(directory: Path) -> None:
    weight_map = shard(directory)
    first = directory / "model-1-of-2.safetensors"
    save_file(load_file(first) | {"not.listed": torch.zeros(1)}, first)
    save_file({"whole.other.model": torch.zeros(1)}, directory / "consolidated.safetensors")
    names = [name for state_dict in open_checkpoint(directory) for name in state_dict.keys()]  # noqa: SIM118
    assert sorted(names) == sorted(weight_map)
    load_model(directory)


def test_missing_shards_are_all_named(directory: Path) -> None:
    shard(directory)
    for file in directory.glob("model-*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"do not exist: model-1-of-2\.safetensors, model-2-of-2"):
        load_model(directory)


def test_a_listed_tensor_that_its_file_lacks_is_named(directory: Path) -> None:
    weight_map = shard(directory)
    weight_map["absent.weight"] = "model-2-of-2.safetensors"
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model-2-of-2\.safetensors lacks tensors .*: absent\.weight"):
        load_model(directory)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', "[]"])
def test_a_broken_index_is_named(directory: Path, text: str) -> None:
    (directory / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is not a safetensors index"):
        load_model(directory)


def test_an_index_stays_inside_its_directory(directory: Path) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists '\.\./model\.safetensors', which is not a file of its directory"):
        load_model(directory)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_named(directory: Path, kept: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load_model(directory)


def test_a_corrupt_header_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load_model(directory)


def test_a_directory_without_weights_is_named(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(directory)
    with pytest.raises(FileNotFoundError, match=r"weight file .*model\.safetensors does not exist"):
        SafetensorsStateDict(directory / "model.safetensors")
