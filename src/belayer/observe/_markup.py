"""HTML and SVG from nested calls. Everything that is not `Markup` is escaped, so no text turns into markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = {"meta", "br", "link", "img"}


class Markup(str):
    """Text that is markup already and is put in as it is."""

    __slots__ = ()


Child = str | int | float | Iterable["Child"] | None


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """One element. Attribute names: `class_` → class, `stroke_width` → stroke-width; one that is None is left out."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        content = _number(value) if isinstance(value, float) else str(value)
        parts.append(f' {label}="{html.escape(_clean(content), quote=True)}"' if value is not True else f" {label}")
    parts.append(">")
    if name in _VOID:
        return Markup("".join(parts))
    parts.extend(_text(child) for child in children)
    parts.append(f"</{name}>")
    return Markup("".join(parts))


def join(children: Iterable[Child]) -> Markup:
    """Several elements one after the other."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(_clean(child), quote=False)
    if isinstance(child, float):
        return _number(child)
    if isinstance(child, int):
        return str(child)
    return "".join(_text(one) for one in child)


def _clean(content: str) -> str:
    """Control characters and lone surrogates, which neither HTML nor UTF-8 can hold, as visible replacements."""
    if content.isprintable():
        return content
    return "".join(one if one.isprintable() or one in "\n\t\u202f\u00a0\u2009" else "\ufffd" for one in content)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
