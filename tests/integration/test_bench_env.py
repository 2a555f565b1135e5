"""The environment benchmark, one round of one workload: it measures what it says, and sees a restore that is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from benchmarks._env_cell import Cell, Effort, Stage
from benchmarks._env_workloads import begin, differences, look, perform, workloads
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import sandboxes

pytestmark = [pytest.mark.integration, needs_sandboxes]


def test_one_round_and_what_it_would_notice(tmp_path: Path):
    idle, heap, http = workloads(True)

    async def body() -> dict[str, Any]:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            # every part of a state that is lost or changed has a name
            box = await manager.create("noticing")
            await begin(box, http)
            await perform(box, http.turn(0))
            state = await look(box, http, 0)
            assert await differences(box, http, state) == set()
            assert await differences(box, http, state) == {"http"}  # asked once more than it should have been
            await box.shell("kill $job $server; wait $job $server; turn=1; echo more >> /data/log")
            assert await differences(box, http, state) == {"files", "shell", "jobs", "http"}
            await manager.discard("noticing")
            return await Cell(Stage(manager, "no podman", "no second runtime"), heap).run(Effort(1, 1, 0.0))

    cell = asyncio.run(body())
    assert cell["checks"]["restores_checked"] == 1
    assert not any(count for name, count in cell["checks"].items() if name != "restores_checked"), cell["checks"]
    assert cell["checkpoint"]["image_bytes"] > 100 << 20
    assert 0 < cell["checkpoint"]["frozen"]["median_s"] < cell["checkpoint"]["total"]["median_s"]
    phases = cell["subject"]["phases_s"]
    assert 0 < phases["restore.criu_s"] < phases["restore_s"] < cell["subject"]["median_s"]
    assert cell["baselines"]["podman"] == {"skipped": "no podman"}
    assert cell["ratios"].keys() == {"new_container_replay", "fs_only_restore"}
    assert len(cell["fork_of_8"]["samples_s"]) == 1 and idle.setup == heap.setup[: len(idle.setup)]
