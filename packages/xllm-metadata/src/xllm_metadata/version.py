"""The contract's version, and the handshake that compares the C++ side with the Python side.

The version rule:

- The *major* version changes when a field is removed or renamed, or its type, memory, presence or meaning changes.
  Both sides must have the same major version.
- The *minor* version changes when optional fields are added, and for nothing else. The new fields carry it in `since`.
  So no field is newer than `CONTRACT_VERSION`, and a minor version above 0 has a field of exactly that version.
- `version.h` has the same version, so that a C++ build carries it.

A C++ side with a newer minor version works: Python ignores the optional fields that it does not know. A C++ side with
an older minor version works too: it leaves the newer optional fields absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .fields import FIELDS, FIELDS_BY_NAME
from .schema import Field, Presence

CONTRACT_VERSION: Final[tuple[int, int]] = (1, 2)
"""(major, minor) of the step contract. `check_version` holds it against the table when this module is imported."""

FieldDescription = tuple[str, str, bool]
"""A field as the C++ side reports it: name, type ("tensor", "int" or "bool"), whether it is optional."""


def check_version(fields: Sequence[Field], version: tuple[int, int]) -> None:
    """Checks a table and its version against the version rule.

    Raises:
        ValueError: a field newer than the version, a field that a minor version added and that is not optional, or a
            minor version that added no field.
    """
    for field in fields:
        if field.since > version:
            raise ValueError(
                f"field {field.name} has since={field.since}; the contract's version is {version}: raise "
                "CONTRACT_VERSION and version.h"
            )
        if field.since[0] == version[0] and field.since[1] > 0 and field.presence is not Presence.OPTIONAL:
            raise ValueError(
                f"field {field.name} has since={field.since} and presence {field.presence.value!r}; a minor version "
                "adds optional fields only"
            )
    if version[1] > 0 and all(field.since != version for field in fields):
        raise ValueError(f"the contract's version is {version}; no field has that in since, so no field was added")


def check_contract(version: tuple[int, int], fields: Sequence[FieldDescription]) -> None:
    """Compares the contract of a C++ side with this one. The bridge calls it once, when it starts.

    Args:
        version: (major, minor) compiled into the C++ side.
        fields: every property of its metadata struct.

    Raises:
        RuntimeError: lists every difference that the version rule does not allow.
    """
    problems: list[str] = []
    if version[0] != CONTRACT_VERSION[0]:
        problems.append(
            f"major version: C++ has {version[0]}.{version[1]}, Python has {CONTRACT_VERSION[0]}.{CONTRACT_VERSION[1]}"
        )
    theirs = {name: (type_name, optional) for name, type_name, optional in fields}
    for field in FIELDS:
        if field.name in theirs:
            problems += _differences(field, *theirs[field.name])
        elif field.presence is not Presence.OPTIONAL or field.since <= version:
            problems.append(f"field {field.name} ({field.shape_text}): missing in C++")
    for name, (type_name, optional) in theirs.items():
        if name not in FIELDS_BY_NAME and not (optional and version > CONTRACT_VERSION):
            problems.append(f"field {name} ({type_name}): unknown to Python")
    if problems:
        raise RuntimeError(
            "the C++ side and xllm_metadata disagree on the step contract; rebuild the C++ side against "
            "`python -m xllm_metadata --cmakedir`:\n  " + "\n  ".join(problems)
        )


def _differences(field: Field, type_name: str, optional: bool) -> list[str]:
    problems: list[str] = []
    ours_optional = field.presence is not Presence.ALWAYS
    # A C++ tensor has no static dtype, so its type is "tensor". `validate` checks dtypes.
    if type_name != field.type.value and not (type_name == "tensor" and field.type.is_tensor):
        problems.append(f"field {field.name}: C++ has {type_name}, Python has {field.type.value}")
    if optional != ours_optional:
        words = {True: "optional", False: "always present"}
        problems.append(f"field {field.name}: C++ says {words[optional]}, Python says {words[ours_optional]}")
    return problems


check_version(FIELDS, CONTRACT_VERSION)
