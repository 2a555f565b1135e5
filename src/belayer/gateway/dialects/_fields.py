"""Reading a JSON object field by field, so that nothing in it is overlooked."""

from __future__ import annotations

import difflib
from typing import Any

from belayer.gateway.problems import bad, unsupported


class Fields:
    """The fields of one object. What nobody has taken by `end` is an error: nothing is ignored silently.

    A field that is null counts as not given.
    """

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, dict):
            raise bad(f"{where or 'the body'} must be a JSON object", where or None)
        self._left: dict[str, Any] = dict(values)
        self._known: set[str] = set()
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._left.get(name) is not None

    def name(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str, default: Any = None) -> Any:
        self._known.add(name)
        value = self._left.pop(name, None)
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        return self._typed(name, default, str, "a string")

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, default, bool, "true or false")

    def whole(self, name: str, default: int) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(f"{self.name(name)} must be a whole number", self.name(name))
        return value

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad(f"{self.name(name)} must be a number", self.name(name))
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string, or a list of them."""
        value = self.take(name, ())
        value = (value,) if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
            raise bad(f"{self.name(name)} must be a string or a list of strings, none of them empty", self.name(name))
        return tuple(value)

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.take(name, ())
        value = [value] if isinstance(value, int) else value
        if not is_ids(value):
            raise bad(f"{self.name(name)} must be a list of token ids", self.name(name))
        return tuple(value)

    def only(self, name: str, *neutral: Any, why: str) -> None:
        """A parameter that can be honoured only if it is absent or says what would happen anyway."""
        value = self.take(name)
        if value is None or any(value == item and type(value) is type(item) for item in neutral):
            return
        if isinstance(value, int | float) and not isinstance(value, bool) and value in neutral:
            return
        raise unsupported(self.name(name), why)

    def without_effect(self, *names: str) -> None:
        """Known fields that change no token."""
        for name in names:
            self.take(name)

    def end(self) -> None:
        for name in self._left:
            close = difflib.get_close_matches(name, self._known, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise bad(f"unknown parameter {self.name(name)!r}{hint}", self.name(name), "unknown_parameter")

    def _typed(self, name: str, default: Any, kind: type, what: str) -> Any:
        value = self.take(name, default)
        if not isinstance(value, kind):
            raise bad(f"{self.name(name)} must be {what}", self.name(name))
        return value


def is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is int and item >= 0 for item in value)
