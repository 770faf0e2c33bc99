"""One table: the Protocol, the builder, the static buffers, the headers and the printed page all list FIELDS."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_type_hints

import pytest
import torch

from xllm_metadata import (
    FIELDS,
    AttentionMetadata,
    BuiltAttentionMetadata,
    FieldType,
    Padding,
    Presence,
    StaticAttentionMetadata,
    build_attention_metadata,
    get_cmake_dir,
    get_include,
)
from xllm_metadata.fields import _read_fields
from xllm_metadata.schema import device_tensor, scalar

NAMES = [field.name for field in FIELDS]
ALIASES = [field.alias for field in FIELDS if field.alias]
PROPERTY = re.compile(r"^\s*XLLM_METADATA_PROPERTY\(([^;]+), (\w+)\)", re.MULTILINE)


def header_properties() -> list[tuple[str, str]]:
    text = (Path(get_include()) / "xllm_metadata/attention_metadata.h").read_text()
    return [(name, cpp_type) for cpp_type, name in PROPERTY.findall(text)]


def test_names_are_unique() -> None:
    assert len(set(NAMES + ALIASES)) == len(NAMES + ALIASES)


def test_the_table_is_the_protocol() -> None:
    assert list(AttentionMetadata.__annotations__) == NAMES
    assert all(isinstance(getattr(AttentionMetadata, alias), property) for alias in ALIASES)


def public_types(cls: type) -> list[tuple[str, object]]:
    """(name, type) of the annotations in a class's own body, in order."""
    hints = get_type_hints(cls)
    return [(name, hints[name]) for name in cls.__annotations__ if not name.startswith("_")]


TYPES = public_types(AttentionMetadata)


def test_built_metadata_has_the_fields_of_the_table_in_order() -> None:
    assert public_types(BuiltAttentionMetadata) == TYPES
    optional = {field.name for field in dataclasses.fields(BuiltAttentionMetadata) if field.default is None}
    assert optional == {field.name for field in FIELDS if field.presence is not Presence.ALWAYS}
    assert [field.name for field in dataclasses.fields(BuiltAttentionMetadata)] == NAMES


def test_static_metadata_has_the_fields_of_the_table_in_order() -> None:
    aliases = [(field.alias, dict(TYPES)[field.name]) for field in FIELDS if field.alias]
    assert public_types(StaticAttentionMetadata) == [*TYPES, *aliases]
    static = StaticAttentionMetadata(max_num_tokens=1, max_num_seqs=1, max_num_pages=1, device="cpu")
    static.fill(build_attention_metadata([], [], [], 1), num_tokens=1, num_seqs=1)
    assert {name for name in vars(static) if not name.startswith("_")} == {*NAMES, *ALIASES, "device"}


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (torch.Tensor, "Table.broken needs one Field in its annotation, has 0"),
        (
            Annotated[int, device_tensor("T", "", Padding.ZERO)],
            "Table.broken is an int32 tensor and must be of type Tensor",
        ),
        (Annotated[float, scalar("")], "Table.broken is an int and must be of type int"),
        (
            Annotated[torch.Tensor, device_tensor("T", "", Padding.ZERO, presence=Presence.OPTIONAL)],
            "Table.broken has presence 'optional'; its type must include None exactly when that is not 'always'",
        ),
        (
            Annotated[torch.Tensor, device_tensor("T", "", Padding.ZERO, alias="nothing")],
            "Table.broken has the alias nothing, which is no property of Table",
        ),
    ],
)
def test_a_member_that_contradicts_itself_is_named(hint: object, message: str) -> None:
    table = type("Table", (), {"__annotations__": {"broken": hint}})
    with pytest.raises(TypeError, match=message):
        _read_fields(table)


def test_the_header_declares_the_table_in_order() -> None:
    assert [name for name, _ in header_properties()] == NAMES


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_header_declares_each_type(field: object) -> None:
    assert isinstance(field, type(FIELDS[0]))
    base = {FieldType.INT: "int64_t", FieldType.BOOL: "bool"}.get(field.type, "at::Tensor")
    wanted = base if field.presence is Presence.ALWAYS else f"std::optional<{base}>"
    assert dict(header_properties())[field.name] == wanted


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_tensor_says_how_it_is_padded(field: object) -> None:
    assert isinstance(field, type(FIELDS[0]))
    assert (field.padding is Padding.NONE) == (not field.type.is_tensor)
    assert bool(field.shape) == field.type.is_tensor
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


def test_the_committed_page_is_the_generated_one() -> None:
    """To renew it: python -m xllm_metadata --page > docs/contract.md."""
    page = Path(__file__).parents[3] / "docs" / "contract.md"
    assert (
        page.read_text()
        == subprocess.run(
            [sys.executable, "-m", "xllm_metadata", "--page"], capture_output=True, text=True, check=True
        ).stdout
    )
    assert all(f"| {field.name} " in page.read_text() for field in FIELDS)
