"""The few pieces that all figures share: scales, ticks, axes, markers and the frame around a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from belayer.observe._markup import Markup, tag

WIDTH = 960.0


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        part = 0.5 if span <= 0 else (value - self.low) / span
        return self.start + min(1.0, max(0.0, part)) * (self.end - self.start)


def log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A logarithmic map from positive data to pixels; what lies outside is drawn at the edge."""
    line = Scale(math.log10(low), math.log10(high), start, end)
    return lambda value: line(math.log10(min(high, max(low, value))))


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round values between `low` and `high`, about `about` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def time_ticks(high: float, about: int = 8) -> list[float]:
    """Ticks from 0 to `high` seconds at steps people use for time (… 10, 15, 30 s, 1, 2, 5 min …)."""
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((one for one in steps if high / one <= about), None)
    if step is None:
        return ticks(0, high, about)
    return [index * step for index in range(int(high / step + 1e-9) + 1)]


def time_label(seconds: float, high: float) -> str:
    """A tick of a time axis that ends at `high` seconds."""
    if high < 120:
        return f"{seconds:g} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if high >= 3600 else f"{rest // 60}:{rest % 60:02d}"


def label(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "tick", **more: object) -> Markup:
    """A piece of text in a drawing."""
    return tag("text", content, x=x, y=y, text_anchor=anchor, class_=class_, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, title: str = "", **more: object) -> Markup:
    """A rectangle; `title` is its tooltip and its name for a screen reader."""
    inside = tag("title", title) if title else None
    return tag("rect", inside, x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_, **more)


def polyline(points: list[tuple[float, float]], class_: str) -> Markup:
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return tag("polyline", points=path, class_=class_)


def cross(x: float, y: float, size: float, class_: str, title: str) -> Markup:
    """An × with a tooltip."""
    left, right, top, bottom = (f"{edge:.2f}" for edge in (x - size, x + size, y - size, y + size))
    path = f"M{left} {top}L{right} {bottom}M{left} {bottom}L{right} {top}"
    return tag("path", tag("title", title), d=path, class_=class_)


def drawing(height: float, title: str, *children: Markup | None) -> Markup:
    """The svg element; `title` describes the drawing for those who do not see it."""
    return tag(
        "svg",
        tag("title", title),
        list(children),
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=title,
        preserveAspectRatio="xMidYMid meet",
    )


def legend(*entries: tuple[str, str]) -> Markup:
    """A row of (class of the swatch, text)."""
    return tag(
        "p",
        [tag("span", tag("i", class_=f"swatch {class_}", aria_hidden="true"), text) for class_, text in entries],
        class_="legend",
    )
