"""Prints the pages of the reference that come from the program itself, as JSON: {path: Markdown}.

Commands from the command line's own help, settings from the models that check them. Run with the environment that
Belayer runs in; the site is built with another one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import PydanticUndefined

from belayer.cli.app import app
from belayer.cli.settings import choices, round_bytes, sections


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    text = app.generate_docs()
    text = re.sub(r"## Table of Contents\n.*?(?=^\*\*Commands)", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^# belayer$", "# Commands", text, count=1, flags=re.MULTILINE)
    return text.replace("*[default: False]*", "")


def settings() -> str:
    """One table per section of the configuration."""
    lines = [
        "# Settings",
        "",
        "A TOML file has one table per section. In Python the same names are fields: `Config(engine={...})`. A setting",
        "may also come from the environment, `BELAYER_ENGINE__STANDBY=none` for `engine.standby`. An unknown name is",
        "an error that says which one was probably meant.",
        "",
    ]
    for section, model in sections():
        lines += [
            f"## {section}",
            "",
            (model.__doc__ or "").strip(),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key, each in model.model_fields.items():
            values = _type(each.annotation)
            lines.append(f"| `{section}.{key}` | {values} | {_default(each.default)} | {each.description or ''} |")
        lines.append("")
    return "\n".join(lines)


def _type(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = text.replace("pathlib.", "").replace("typing.", "")
    if words := choices(annotation):
        return " · ".join(f"`{word}`" for word in words)
    return text.replace("|", "or")


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return "–"
    if size := round_bytes(value):
        return size
    return f"`{json.dumps(value)}`" if value != "" else "–"


if __name__ == "__main__":
    print(json.dumps({"reference/cli.md": commands(), "reference/settings.md": settings()}))
