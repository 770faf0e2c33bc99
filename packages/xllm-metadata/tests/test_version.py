"""The handshake: what it accepts and what it lists."""

from __future__ import annotations

import pytest

from xllm_metadata import CONTRACT_VERSION, check_contract
from xllm_metadata.version import FieldDescription, describe_fields

MAJOR, MINOR = CONTRACT_VERSION


def cpp_fields() -> list[FieldDescription]:
    """As a C++ side reports them: its tensors have no dtype."""
    return [(n, "tensor" if "tensor" in kind else kind, optional) for n, kind, optional in describe_fields()]


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
