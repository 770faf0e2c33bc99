"""The version rule (table, version and header agree) and the handshake: what it accepts and what it lists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from xllm_metadata import CONTRACT_VERSION, FIELDS, Field, Presence, check_contract, get_include
from xllm_metadata.version import FieldDescription, check_version

MAJOR, MINOR = CONTRACT_VERSION
HEADER = (Path(get_include()) / "xllm_metadata/version.h").read_text()


def check_agreement(fields: tuple[Field, ...], version: tuple[int, int], header: str) -> None:
    """Raises `ValueError` when the table, the version and the text of version.h contradict each other."""
    check_version(fields, version)
    numbers = dict(re.findall(r"kContractVersion(Major|Minor) = (\d+);", header))
    if (int(numbers["Major"]), int(numbers["Minor"])) != version:
        raise ValueError(f"version.h has {numbers['Major']}.{numbers['Minor']}, CONTRACT_VERSION is {version}")


def header(major: int, minor: int) -> str:
    return re.sub(r"Minor = \d+", f"Minor = {minor}", re.sub(r"Major = \d+", f"Major = {major}", HEADER))


def added(since: tuple[int, int], presence: Presence = Presence.OPTIONAL) -> tuple[Field, ...]:
    """The table of version 1.0 and a field that came later."""
    later = replace(FIELDS[-1], name="later", since=since, presence=presence)
    return (*(replace(field, since=(1, 0)) for field in FIELDS), later)


def test_table_version_and_header_agree() -> None:
    check_agreement(FIELDS, CONTRACT_VERSION, HEADER)


@pytest.mark.parametrize("version", [(1, 1), (2, 0)])
def test_a_version_that_covers_every_field_is_accepted(version: tuple[int, int]) -> None:
    check_agreement(added((1, 1)), version, header(*version))


@pytest.mark.parametrize(
    ("fields", "version", "text", "message"),
    [
        (added((1, 1)), (1, 0), header(1, 0), r"field later has since=\(1, 1\); the contract's version is \(1, 0\)"),
        (added((1, 1)), (1, 0), header(1, 1), r"field later has since=\(1, 1\); the contract's version is \(1, 0\)"),
        (added((1, 1)), (1, 1), header(1, 0), r"version.h has 1.0, CONTRACT_VERSION is \(1, 1\)"),
        (added((1, 0)), (1, 0), header(1, 1), r"version.h has 1.1, CONTRACT_VERSION is \(1, 0\)"),
        (added((1, 0)), (1, 0), header(2, 0), r"version.h has 2.0, CONTRACT_VERSION is \(1, 0\)"),
        (added((1, 0)), (1, 1), header(1, 1), r"version is \(1, 1\); no field has that in since"),
        (added((1, 1)), (2, 1), header(2, 1), r"version is \(2, 1\); no field has that in since"),
        (added((2, 0)), (1, 1), header(1, 1), r"field later has since=\(2, 0\); the contract's version is \(1, 1\)"),
        (
            added((1, 1), Presence.ALWAYS),
            (1, 1),
            header(1, 1),
            r"field later has since=\(1, 1\) and presence 'always'; a minor version adds optional fields only",
        ),
    ],
)
def test_tables_versions_and_headers_that_disagree_are_refused(
    fields: tuple[Field, ...], version: tuple[int, int], text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_agreement(fields, version, text)


def cpp_fields() -> list[FieldDescription]:
    """As a C++ side reports them: its tensors have no dtype."""
    return [
        (field.name, "tensor" if field.type.is_tensor else field.type.value, field.presence is not Presence.ALWAYS)
        for field in FIELDS
    ]


def without(name: str) -> list[FieldDescription]:
    return [field for field in cpp_fields() if field[0] != name]


def test_equal_sides_agree() -> None:
    check_contract(CONTRACT_VERSION, cpp_fields())


def test_a_newer_side_may_add_optional_fields() -> None:
    check_contract((MAJOR, MINOR + 1), [*cpp_fields(), ("later_table", "tensor", True)])


@pytest.mark.parametrize(
    ("version", "fields", "message"),
    [
        ((MAJOR + 1, 0), cpp_fields(), f"major version: C\\+\\+ has {MAJOR + 1}.0, Python has {MAJOR}.{MINOR}"),
        (CONTRACT_VERSION, without("slot_mapping"), r"field slot_mapping \(\[T\] int32\): missing in C\+\+"),
        (CONTRACT_VERSION, without("block_table"), r"field block_table .*missing in C\+\+"),
        (CONTRACT_VERSION, [*cpp_fields(), ("extra", "tensor", True)], r"field extra \(tensor\): unknown to Python"),
        ((MAJOR, MINOR + 1), [*cpp_fields(), ("extra", "tensor", False)], r"field extra \(tensor\): unknown to Python"),
        (
            CONTRACT_VERSION,
            [*without("max_seq_len"), ("max_seq_len", "tensor", False)],
            r"field max_seq_len: C\+\+ has tensor, Python has int",
        ),
        (
            CONTRACT_VERSION,
            [*without("slot_mapping"), ("slot_mapping", "tensor", True)],
            r"field slot_mapping: C\+\+ says optional, Python says always present",
        ),
    ],
)
def test_differences_are_listed(version: tuple[int, int], fields: list[FieldDescription], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        check_contract(version, fields)


def test_all_differences_are_in_one_message() -> None:
    with pytest.raises(RuntimeError) as error:
        check_contract(CONTRACT_VERSION, [*without("slot_mapping")[1:], ("extra", "int", False)])
    assert str(error.value).count("\n") == 3
