"""All resources by name: those of the shell and those that are programs."""

from __future__ import annotations

from pathlib import Path

from .inside.hold import load_all
from .inside.kit import REGISTRY, Resource
from .shells import SHELLS, ShellResource

LEVELS = ("fs", "fs+shell", "full")
INSIDE = Path(__file__).parent / "inside"
load_all()


def entry(name: str) -> ShellResource | type[Resource]:
    return SHELLS[name] if name in SHELLS else REGISTRY[name]


def names(level: str = "full") -> list[str]:
    """Resources that a checkpoint of this level must bring back."""
    most = LEVELS.index(level)
    return [name for name in (*SHELLS, *REGISTRY) if LEVELS.index(entry(name).level) <= most]
