"""`FIELDS`: the step contract as data, read from the annotations of `AttentionMetadata`."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

import torch

from .protocol import AttentionMetadata
from .schema import Field, FieldType, Presence


def _read_fields(table: type) -> tuple[Field, ...]:
    """Reads the fields of a Protocol, in order. Each member is `Annotated` with one `Field`.

    Raises:
        TypeError: names the member that has no `Field` or whose type contradicts it, or the alias that is no property.
    """
    fields = []
    for name, hint in get_type_hints(table, include_extras=True).items():
        where = f"{table.__name__}.{name}"
        declared = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Field)]
        if len(declared) != 1:
            raise TypeError(f"{where} needs one Field in its annotation, has {len(declared)}")
        (field,) = declared
        python_type = get_args(hint)[0]
        if not field.shape and python_type is bool:
            field = replace(field, type=FieldType.BOOL)
        _check_type(where, field, python_type)
        if field.alias is not None and not isinstance(getattr(table, field.alias, None), property):
            raise TypeError(f"{where} has the alias {field.alias}, which is no property of {table.__name__}")
        fields.append(replace(field, name=name))
    return tuple(fields)


def _check_type(where: str, field: Field, python_type: Any) -> None:
    arguments = get_args(python_type) if get_origin(python_type) is UnionType else (python_type,)
    (base,) = (argument for argument in arguments if argument is not NoneType)
    expected = {FieldType.INT: int, FieldType.BOOL: bool}.get(field.type, torch.Tensor)
    if base is not expected:
        raise TypeError(f"{where} is an {field.type.value} and must be of type {expected.__name__}, not {base}")
    if (NoneType in arguments) != (field.presence is not Presence.ALWAYS):
        raise TypeError(
            f"{where} has presence {field.presence.value!r}; its type must include None exactly when that is not "
            "'always'"
        )


FIELDS: Final[tuple[Field, ...]] = _read_fields(AttentionMetadata)
"""Every field of the contract, in the order of the C++ struct's properties."""

FIELDS_BY_NAME: Final[dict[str, Field]] = {field.name: field for field in FIELDS}
"""`FIELDS` by name."""
