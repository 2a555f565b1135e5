"""The runtimes to be tried, and the verdicts: a group of resources is run once, when the first of its cases asks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from benchmarks.conformance import STAGES, Runtime, arrange, names, run_group
from benchmarks.conformance.engine import Verdicts
from benchmarks.conformance.own import OwnRuntime
from tests.sandbox_kit import sandboxes

MEMORY_BYTES = 3 << 30
IMAGE = os.environ.get("BELAYER_TEST_IMAGE", "base")


@asynccontextmanager
async def own(folder: Path) -> AsyncIterator[Runtime]:
    async with sandboxes(folder / "checkpoints", image=IMAGE, memory_bytes=MEMORY_BYTES) as manager:
        yield OwnRuntime(manager)


@asynccontextmanager
async def podman(folder: Path) -> AsyncIterator[Runtime]:
    config = {"image": IMAGE, "memory_bytes": MEMORY_BYTES, "runtime": "podman"}
    async with sandboxes(folder / "checkpoints", **config) as manager:
        yield OwnRuntime(manager)


# name: level of its checkpoints, and the runtime. Another runtime or level is one line more
RUNTIMES = {"belayer": ("full", own)}
if os.environ.get("CONFORMANCE_PODMAN"):  # some minutes more; test_sandbox_podman.py is what runs every time
    RUNTIMES["podman"] = ("full", podman)


class Verdict:
    """Answers a case's question from the run of its group; groups run one after the other, each once."""

    def __init__(self, runtime: str, folder: Callable[[], Path]) -> None:
        self.level, self._open = RUNTIMES[runtime]
        self._folder = folder
        self._groups = arrange(names(self.level))
        self._found: Verdicts = {}

    def of(self, name: str, stage: str) -> str | None:
        if name not in self._found:
            group = next(group for group in self._groups if name in group)
            try:
                self._found |= asyncio.run(self._run(group))
            except Exception as error:  # every case of the group says it, and it is not tried again for each
                why = f"the runtime failed: {type(error).__name__}: {error}"
                self._found |= {member: dict.fromkeys(STAGES, why) for member in group}
        return self._found[name][stage]

    async def _run(self, group: list[str]) -> Verdicts:
        async with self._open(self._folder()) as runtime:
            return await run_group(runtime, group)


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Verdict]:
    known: dict[str, Verdict] = {}

    def of(runtime: str) -> Verdict:
        if runtime not in known:
            known[runtime] = Verdict(runtime, lambda: tmp_path_factory.mktemp("conformance"))
        return known[runtime]

    return of
