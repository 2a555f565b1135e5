"""What a runtime must offer to be tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Refused(Exception):
    """The runtime cannot capture this state, and says why."""


class Box(Protocol):
    """One running container with a persistent shell."""

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """Run a command in a fresh process: (exit code, stdout and stderr)."""
        ...

    async def shell(self, command: str) -> tuple[int, bytes]:
        """Run a command in the persistent shell: (exit code, output)."""
        ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def checkpoint(self) -> str:
        """Capture it; a token for `restore`. Raises `Refused`."""
        ...

    async def kill(self) -> None:
        """SIGKILL everything in it; returns when it is dead."""
        ...

    async def restore(self, token: str) -> Box: ...

    async def fork(self) -> Box:
        """Another one that goes on from this state. Raises `NotImplementedError` where the runtime cannot."""
        ...

    async def close(self) -> None: ...


class Runtime(Protocol):
    name: str
    level: str  # of its checkpoints: `full`, `fs+shell` or `fs`

    async def create(self) -> Box: ...
