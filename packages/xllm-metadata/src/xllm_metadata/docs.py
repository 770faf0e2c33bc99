"""Renders the contract as text, from `FIELDS`. Owns the wording around the table, not the facts in it."""

from __future__ import annotations

from .fields import FIELDS
from .version import CONTRACT_VERSION
from .vocabulary import Field, When


def fields_table() -> str:
    """The field table in Markdown."""
    rows = ["| field | shape, dtype | where | when | a padded graph row | meaning |", "| --- " * 6 + "|"]
    rows += [_row(field) for field in FIELDS]
    return "\n".join(rows)


def fields_page() -> str:
    """What `python -m xllm_metadata --fields` prints."""
    major, minor = CONTRACT_VERSION
    return f"Step contract {major}.{minor}. T tokens, B sequences, P pages.\n\n{fields_table()}"


def _row(field: Field) -> str:
    name = field.name + (f" (alias {field.alias}, same tensor)" if field.alias else "")
    when = f"optional, for {field.owner}" if field.when is When.OPTIONAL else field.when.value
    cells = (name, field.shape_text, field.where.value, when, field.padding.value, field.doc)
    return "| " + " | ".join(cells) + " |"
