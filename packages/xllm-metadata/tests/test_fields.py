"""One table: the Protocol, the builder, the static buffers, the headers and the printed page all list FIELDS."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xllm_metadata import (
    FIELDS,
    AttentionMetadata,
    BuiltAttentionMetadata,
    Kind,
    Padding,
    StaticAttentionMetadata,
    When,
    get_cmake_dir,
    get_include,
)

NAMES = [field.name for field in FIELDS]
ALIASES = [field.alias for field in FIELDS if field.alias]
PROPERTY = re.compile(r"^\s*PROPERTY\(([^;]+), (\w+)\)", re.MULTILINE)


def header_properties() -> list[tuple[str, str]]:
    text = (Path(get_include()) / "xllm/metadata/attention_metadata.h").read_text()
    return [(name, kind) for kind, name in PROPERTY.findall(text)]


def test_names_are_unique() -> None:
    assert len(set(NAMES + ALIASES)) == len(NAMES + ALIASES)


def test_protocol_declares_exactly_the_table() -> None:
    members = {name for name in vars(AttentionMetadata) if not name.startswith("_")}
    assert members == {*NAMES, *ALIASES}


def test_built_metadata_has_exactly_the_table() -> None:
    assert [field.name for field in dataclasses.fields(BuiltAttentionMetadata)] == NAMES


def test_static_metadata_declares_exactly_the_table() -> None:
    public = {name for name in StaticAttentionMetadata.__annotations__ if not name.startswith("_")}
    assert public == set(NAMES)


def test_the_header_declares_the_table_in_order() -> None:
    assert [name for name, _ in header_properties()] == NAMES


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_header_declares_each_kind(field: object) -> None:
    assert isinstance(field, type(FIELDS[0]))
    base = {Kind.INT: "int64_t", Kind.BOOL: "bool"}.get(field.kind, "at::Tensor")
    wanted = base if field.when is When.ALWAYS else f"std::optional<{base}>"
    assert dict(header_properties())[field.name] == wanted


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_tensor_says_how_it_is_padded(field: object) -> None:
    assert isinstance(field, type(FIELDS[0]))
    assert (field.padding is Padding.NONE) == (not field.kind.is_tensor)
    assert bool(field.shape) == field.kind.is_tensor
    assert field.doc


def run_module(argument: str) -> str:
    command = [sys.executable, "-m", "xllm_metadata", argument]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_command_prints_every_field() -> None:
    page = run_module("--fields")
    for field in FIELDS:
        assert f"| {field.name} " in page
        assert field.doc in page


def test_the_command_prints_the_folders() -> None:
    assert run_module("--include") == get_include()
    assert run_module("--cmakedir") == get_cmake_dir()
    assert (Path(get_cmake_dir()) / "xllm_metadata-config.cmake").is_file()
