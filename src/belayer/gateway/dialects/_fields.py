"""Reading a JSON object field by field, so that nothing in it is overlooked."""

from __future__ import annotations

import difflib
import math
from typing import Any

from belayer.gateway.problems import bad, unsupported

_LARGEST = (1 << 63) - 1
"""Of any whole number in a body: what is let in must fit into the journal and into messages to a worker."""
_MOST_TOKEN = 1 << 31
_MOST_STRINGS, _MOST_CHARACTERS = 1024, 1 << 16  # of stop strings together: each is looked for at every token


class Fields:
    """The fields of one object. What nobody has taken by `end` is an error: nothing is ignored silently.

    A field that is null counts as not given.
    """

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, dict):
            raise bad(f"{where or 'the body'} must be a JSON object", where or None)
        self._left: dict[str, Any] = dict(values)
        self._known: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._left.get(name) is not None

    def name(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

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
        if not -_LARGEST <= value <= _LARGEST:
            raise bad(f"{self.name(name)} must fit into 64 bits", self.name(name))
        return value

    def number(self, name: str, default: float) -> float:
        value = finite(self.take(name, default))
        if value is None:
            raise bad(f"{self.name(name)} must be a number, and finite", self.name(name))
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string, or a list of them."""
        value = self.take(name, ())
        value = (value,) if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
            raise bad(f"{self.name(name)} must be a string or a list of strings, none of them empty", self.name(name))
        if len(value) > _MOST_STRINGS or sum(map(len, value)) > _MOST_CHARACTERS:
            limits = f"{_MOST_STRINGS} strings and {_MOST_CHARACTERS} characters"
            raise bad(f"{self.name(name)} must hold no more than {limits}", self.name(name))
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
    return isinstance(value, list | tuple) and all(type(item) is int and 0 <= item < _MOST_TOKEN for item in value)


def finite(value: Any) -> float | None:
    """`value` if it is a number that a float can hold, else None. JSON's whole numbers have no bound."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None
