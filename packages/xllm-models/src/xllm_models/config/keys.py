"""Reads typed values from a configuration mapping, in which a value may have one of several names.

Owns the errors for missing, wrongly typed and contradictory keys. The meaning of the keys belongs to the callers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConfigKeys:
    """A configuration mapping. Each method takes the alternative names of one value; null counts as absent.

    `defaults` holds the values of absent keys. ValueError, with the names, for alternatives with different values, a
    value of the wrong type, and an absent value that is required.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str = "config", *, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self._raw = raw
        self._where = where
        self._defaults = defaults or {}

    def find(self, *names: str) -> Any:
        """The one value that the names agree on, or None."""
        present = {name: self._raw[name] for name in names if self._raw.get(name) is not None}
        values = list(present.values())
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{name}={value!r}" for name, value in present.items())
            raise ValueError(f"contradictory keys in {self._where}: {listed}")
        if values:
            return values[0]
        return next((self._defaults[name] for name in names if name in self._defaults), None)

    def given(self, name: str) -> bool:
        """Whether the mapping or the defaults have the name, be its value null or not."""
        return name in self._raw or name in self._defaults

    def is_null(self, name: str) -> bool:
        """Whether the mapping has null for the name, or the defaults do and the mapping does not have the name."""
        return self.given(name) and self._raw.get(name, self._defaults.get(name)) is None

    def _typed(self, names: tuple[str, ...], types: tuple[type, ...], expected: str) -> Any:
        value = self.find(*names)
        # bool is a subclass of int, but `"num_layers": true` is a mistake.
        if value is None or (isinstance(value, types) and (bool in types or not isinstance(value, bool))):
            return value
        raise ValueError(f"{names[0]} in {self._where} must be {expected}, got {value!r}")

    def require(self, value: Any, *names: str) -> Any:
        if value is None:
            raise ValueError(f"{self._where} has no {' or '.join(names)}")
        return value

    def optional_int(self, *names: str) -> int | None:
        value: int | None = self._typed(names, (int,), "an integer")
        return value

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.optional_int(*names)
        value = default if value is None else value
        required: int = self.require(value, *names)
        return required

    def optional_float(self, *names: str) -> float | None:
        value = self._typed(names, (int, float), "a number")
        return None if value is None else float(value)

    def number(self, *names: str, default: float | None = None) -> float:
        value = self.optional_float(*names)
        value = default if value is None else value
        required: float = self.require(value, *names)
        return required

    def boolean(self, *names: str, default: bool) -> bool:
        value = self._typed(names, (bool,), "true or false")
        return default if value is None else bool(value)

    def string(self, *names: str, default: str | None = None) -> str:
        value = self._typed(names, (str,), "a string")
        value = default if value is None else value
        required: str = self.require(value, *names)
        return required

    def integers(self, *names: str) -> tuple[int, ...]:
        """An integer or a list of them; absent means none."""
        value = self.find(*names)
        if value is None:
            return ()
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if any(not isinstance(one, int) or isinstance(one, bool) for one in values):
            raise ValueError(f"{names[0]} in {self._where} must be an integer or a list of them, got {value!r}")
        return values

    def numbers(self, *names: str) -> tuple[float, ...]:
        """A list of numbers; absent means none."""
        value = self._typed(names, (list, tuple), "a list of numbers")
        if any(not isinstance(one, (int, float)) or isinstance(one, bool) for one in value or ()):
            raise ValueError(f"{names[0]} in {self._where} must be a list of numbers, got {value!r}")
        return tuple(float(one) for one in value or ())

    def strings(self, *names: str) -> tuple[str, ...]:
        """A list of strings; absent means none."""
        value = self._typed(names, (list, tuple), "a list of strings")
        if any(not isinstance(one, str) for one in value or ()):
            raise ValueError(f"{names[0]} in {self._where} must be a list of strings, got {value!r}")
        return tuple(value or ())

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """A nested mapping; absent means an empty one."""
        value: Mapping[str, Any] | None = self._typed(names, (Mapping,), "a mapping")
        return value or {}
