"""The contract's version and the handshake that compares two sides. Owns no field: `FIELDS` does.

The version rule. A *major* version changes when a field is removed, renamed, or changes kind, place or presence: both
sides must then be of the same major version. A *minor* version may only add fields, and only optional ones: a newer C++
side works with an older Python side, which ignores what it does not know, and the other way round an older C++
side leaves the newer optional fields absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .fields import FIELDS, FIELDS_BY_NAME
from .vocabulary import Field, When

CONTRACT_VERSION: Final[tuple[int, int]] = (1, 0)
"""(major, minor) of the step contract that this package speaks."""

FieldDescription = tuple[str, str, bool]
"""A field as the C++ side reports it: name, kind ("tensor", "int" or "bool"), whether it is optional."""


def describe_fields() -> list[FieldDescription]:
    """This side's fields as the handshake compares them."""
    return [(field.name, field.kind.value, field.when is not When.ALWAYS) for field in FIELDS]


def check_contract(version: tuple[int, int], fields: Sequence[FieldDescription]) -> None:
    """Compares the contract that a C++ side was compiled against with this one, once, when the bridge starts.

    Args:
        version: (major, minor) compiled into the C++ side.
        fields: every property of its metadata struct.

    Raises:
        RuntimeError: lists every difference that matters, not only the first.
    """
    problems: list[str] = []
    if version[0] != CONTRACT_VERSION[0]:
        problems.append(
            f"major version: C++ has {version[0]}.{version[1]}, Python has {CONTRACT_VERSION[0]}.{CONTRACT_VERSION[1]}"
        )
    theirs = {name: (kind, optional) for name, kind, optional in fields}
    for field in FIELDS:
        if field.name in theirs:
            problems += _kind_problems(field, *theirs[field.name])
        elif field.when is not When.OPTIONAL or field.since <= version:
            problems.append(f"field {field.name} ({field.shape_text}): missing in C++")
    for name, (kind, optional) in theirs.items():
        if name not in FIELDS_BY_NAME and not (optional and version > CONTRACT_VERSION):
            problems.append(f"field {name} ({kind}): unknown to Python")
    if problems:
        raise RuntimeError(
            "the C++ side and xllm_metadata disagree on the step contract; rebuild the C++ side against "
            "`python -m xllm_metadata --cmakedir`:\n  " + "\n  ".join(problems)
        )


def _kind_problems(field: Field, kind: str, optional: bool) -> list[str]:
    problems: list[str] = []
    ours_optional = field.when is not When.ALWAYS
    # A C++ tensor has no static dtype: its kind is "tensor", and validate checks the dtype of each step.
    if kind != field.kind.value and not (kind == "tensor" and field.kind.is_tensor):
        problems.append(f"field {field.name}: C++ has {kind}, Python has {field.kind.value}")
    if optional != ours_optional:
        words = {True: "optional", False: "always present"}
        problems.append(f"field {field.name}: C++ says {words[optional]}, Python says {words[ours_optional]}")
    return problems
