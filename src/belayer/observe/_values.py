"""Small helpers that the parts of observe share: reading untyped event data, quantiles, durations, atomic files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from belayer.observe._markup import Markup

LARGEST = 1e12
"""No time, duration or count of a run is larger; in microseconds it still fits 64 bits."""


def number(data: Mapping[str, Any], key: str) -> float | None:
    """`data[key]` as a float of a sane size, or None: a picture must not fail because one event is odd."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if abs(value) <= LARGEST else None  # false for NaN


def whole(data: Mapping[str, Any], key: str) -> int | None:
    """`data[key]` as an int, or None."""
    value = number(data, key)
    return None if value is None else int(value)


def text(data: Mapping[str, Any], key: str, default: str = "") -> str:
    """`data[key]` as a string, `default` where it is absent or None."""
    value = data.get(key)
    return default if value is None else str(value)


def seconds_of(data: Mapping[str, Any], key: str) -> dict[str, float]:
    """`data[key]` as a {name: seconds} table in its own order; entries that are no number are left out."""
    table = data.get(key)
    if not isinstance(table, Mapping):
        return {}
    found = {str(name): number(table, name) for name in table}
    return {name: value for name, value in found.items() if value is not None}


def json_for_html(data: object) -> Markup:
    """`data` as JSON that may stand in a script element: `<`, `>` and `&` are escapes, so no text can end it."""
    content = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        content = content.replace(character, f"\\u{ord(character):04x}")
    return Markup(content)


def phase_label(name: str) -> str:
    """A phase's name for people: `first_token_s` is `first token`."""
    return name.removesuffix("_s").replace("_", " ")


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolated quantile of a non-empty sequence, 0 ≤ q ≤ 1."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    """Mean of a non-empty sequence."""
    return math.fsum(values) / len(values)


def duration(seconds: float) -> str:
    """Seconds for people: `0.4 ms`, `52 ms`, `8.1 s`, `3 min 58 s`, `2 h 05 min`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02d} min"


def clock(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    total = max(0, int(seconds))
    hours, rest = divmod(total, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def count(value: float) -> str:
    """A count with thin spaces between thousands: `81 234`."""
    return f"{value:,.0f}".replace(",", "\u202f")
