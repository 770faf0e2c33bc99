"""`FIELDS`: the step contract as data, read from the members of `AttentionMetadata`."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

import torch

from .protocol import AttentionMetadata
from .vocabulary import Declaration, Field, Kind, When


def _read_fields(table: type) -> tuple[Field, ...]:
    """The fields of a Protocol whose members are annotated with a `Declaration`, in order.

    Raises:
        TypeError: a member without a declaration, or whose type contradicts it; names the member.
    """
    members: dict[str, tuple[Any, Declaration]] = {}
    for name, hint in get_type_hints(table, include_extras=True).items():
        declarations = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Declaration)]
        if len(declarations) != 1:
            raise TypeError(f"{table.__name__}.{name} needs one declaration in its annotation, has {len(declarations)}")
        members[name] = (get_args(hint)[0], declarations[0])
    aliases = {declared.alias_of: name for name, (_, declared) in members.items() if declared.alias_of is not None}
    if unknown := sorted(set(aliases) - set(members)):
        raise TypeError(f"{table.__name__} has an alias of {unknown}, which it does not declare")
    return tuple(
        _field(f"{table.__name__}.{name}", declared.named(name, _kind(kind, declared), aliases.get(name)), kind)
        for name, (kind, declared) in members.items()
        if declared.alias_of is None
    )


def _kind(hint: Any, declared: Declaration) -> Kind:
    if declared.field.shape:
        return declared.field.kind
    return Kind.BOOL if hint is bool else Kind.INT


def _field(where: str, field: Field, hint: Any) -> Field:
    arguments = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    (base,) = (argument for argument in arguments if argument is not NoneType)
    expected = torch.Tensor if field.kind.is_tensor else {Kind.INT: int, Kind.BOOL: bool}[field.kind]
    if base is not expected:
        raise TypeError(f"{where} is a {field.kind.value} and must be of type {expected.__name__}, not {base}")
    if (NoneType in arguments) != (field.when is not When.ALWAYS):
        raise TypeError(
            f"{where} is present {field.when.value!r}; its type must include None exactly when not 'always'"
        )
    return field


FIELDS: Final[tuple[Field, ...]] = _read_fields(AttentionMetadata)
"""Every field of the contract, in the order in which the C++ struct declares them."""

FIELDS_BY_NAME: Final[dict[str, Field]] = {field.name: field for field in FIELDS}
