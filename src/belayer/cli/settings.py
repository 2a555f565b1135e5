"""`belayer settings`: every setting with its meaning and default, as a configuration that can be used."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from belayer.config import Config, TrainConfig

_HEAD = """\
# Every setting of Belayer with its default. A file needs only those that are to be different.
# In Python: load_config(overrides={"engine.standby": "none"}). From outside: BELAYER_ENGINE__STANDBY=none.
"""
_WIDTH = 100


def settings_command(*, as_json: bool) -> int:
    """Print them: TOML with comments, or the JSON schema."""
    print(json.dumps(Config.model_json_schema(), indent=1) if as_json else as_toml(), end="\n" if as_json else "")
    return 0


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """The tables of a configuration, with the classes that check them."""
    for name, field in Config.model_fields.items():
        model = TrainConfig if name == "train" else field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        yield name, model


def choices(annotation: Any) -> list[str]:
    """The words that a setting of this type may be; none where it is no choice of words."""
    return [str(word) for word in get_args(annotation)] if get_origin(annotation) is Literal else []


def round_bytes(value: Any) -> str:
    """A large round number of bytes in GiB or MiB; "" for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 << 20 or value % (1 << 20):
        return ""
    power, unit = (30, "GiB") if value % (1 << 30) == 0 else (20, "MiB")
    return f"{value >> power} {unit}"


def as_toml() -> str:
    """A TOML file that says nothing but the defaults. What has none is a comment, and so is the whole of [train]."""
    lines = [_HEAD]
    for name, model in sections():
        off = "# " if name == "train" else ""  # a file with that table is a training job
        lines += [*_comment(model.__doc__ or ""), f"{off}[{name}]"]
        for key, field in model.model_fields.items():
            lines += _comment(_meaning(field))
            value = _toml(field)
            lines.append(f"{off}{key} = {value}" if value else f"# {key} = …")
        lines.append("")
    return "\n".join(lines)


def _meaning(field: FieldInfo) -> str:
    said = [field.description or ""]
    if words := choices(field.annotation):
        said.append(f"One of: {', '.join(words)}.")
    if size := round_bytes(field.default):
        said.append(f"({size})")
    if field.is_required():
        said.append("(required)")
    return " ".join(filter(None, said))


def _toml(field: FieldInfo) -> str:
    """The default; "" where there is none. JSON's spelling of words, numbers, booleans and lists is TOML's too."""
    return "" if field.is_required() or field.default is None else json.dumps(field.default)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH)]
