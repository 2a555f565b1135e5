"""SIGKILL of the driver at every write of the journal and at every step of delivery: resumed, nothing is lost or twice.

The driver is a forked process with the model environment of the stateful tests; what it leaves is its journal.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.stateful.test_consistency import Chaos, ModelEngine, ModelSandboxes, World, solve

from belayer import events
from belayer.checkpoint.policy import EveryN
from belayer.config import Config, RunConfig
from belayer.faults import failpoints
from belayer.journal import Journal, scan
from belayer.journal.records import Acknowledged, RolloutFinished
from belayer.run import Run
from belayer.verify import verify_run

pytestmark = pytest.mark.crash

TASK = {"turns": 2, "commands": ["a", "b", "c"]}
POINTS = ("journal.append.before", "journal.append.after")
DELIVERY = ("rollout.returned", "rollout.finished", "deliver.before", "acknowledge.before", "acknowledge.after")
STEPS = (
    "turn.begin", "turn.tokens", "turn.journalled", "turn.end", "action.chosen", "action.intended", "action.performed",
    "action.completed", "checkpoint.begin", "checkpoint.journal.before", "checkpoint.journal.after",
)  # fmt: skip


async def session(folder: Path, handed: Path | None = None) -> list:
    """Run two rollouts to the end; each trajectory is noted in `handed` before it is acknowledged."""
    journal = Journal(folder / "journal")
    run = Run(
        SimpleNamespace(path=folder),
        Config(run=RunConfig(max_concurrent=2)),
        journal,
        SimpleNamespace(close=lambda: None),
    )
    run._policy, world, chaos = EveryN(2), World(), Chaos([])
    run.sandboxes, run.engine, run.sink = ModelSandboxes(world, chaos), ModelEngine(world, chaos, 5), events.ignore
    done = []
    try:
        async for trajectory in run.rollouts(solve, [TASK, TASK], name="t"):
            done.append(trajectory)
            if handed is not None:
                with open(handed, "a") as file:
                    file.write(f"{trajectory.rollout_id} {trajectory.token_ids}\n")
            run.acknowledge(trajectory)
    finally:
        journal.close()
    return done


def killed_at(point: str, skip: int, folder: Path, handed: Path) -> bool:
    """Run a session in a process of its own that dies at `point`. False: it was not passed that often."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            failpoints.arm(point, "kill", skip=skip)
            asyncio.run(session(folder, handed))
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the session failed by itself"
    return False


def check_resumed(folder: Path, handed: Path, calm: dict[str, list[int]]) -> None:
    acknowledged = {r.rollout for r in scan(folder / "journal") if isinstance(r, Acknowledged)}
    again = asyncio.run(session(folder, handed))
    assert {each.rollout_id for each in again} == calm.keys() - acknowledged, "one was lost, or came twice"
    lines = handed.read_text().splitlines()
    for line in lines:
        name, _, tokens = line.partition(" ")
        assert tokens == str(calm[name]), f"{name} was handed over as something else"
    assert {line.partition(" ")[0] for line in lines} == calm.keys()
    records = list(scan(folder / "journal"))
    for kind in (RolloutFinished, Acknowledged):
        assert Counter(r.rollout for r in records if isinstance(r, kind)) == dict.fromkeys(calm, 1)
    verdict = verify_run(folder)
    assert verdict.consistent and verdict.delivered == len(calm), verdict.findings
    assert asyncio.run(session(folder)) == [], "what is acknowledged is never handed over again"


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> dict[str, list[int]]:
    return {each.rollout_id: each.token_ids for each in asyncio.run(session(tmp_path_factory.mktemp("calm")))}


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_write_of_the_journal(point, tmp_path, calm):
    passages = 0
    while True:
        folder, handed = tmp_path / str(passages), tmp_path / f"{passages}.handed"
        if not killed_at(point, passages, folder, handed):
            break
        check_resumed(folder, handed, calm)
        passages += 1
    records = sum(1 for _ in scan(tmp_path / str(passages) / "journal"))
    assert passages == records > 40, "some write was not hit"


@pytest.mark.parametrize("point", [*STEPS, *DELIVERY])
def test_killed_at_every_step_of_a_rollout_and_of_its_delivery(point, tmp_path, calm):
    for passage in (0, 1):
        folder, handed = tmp_path / str(passage), tmp_path / f"{passage}.handed"
        assert killed_at(point, passage, folder, handed), f"{point} is not passed"
        check_resumed(folder, handed, calm)


def test_killed_again_and_again(tmp_path, calm):
    """A driver that dies in every session of a run still ends it, one step further each time."""
    folder, handed, deaths = tmp_path / "run", tmp_path / "handed", 0
    while killed_at("journal.append.after", 4, folder, handed):
        deaths += 1
        assert deaths < 60, "no progress"
    assert deaths > 5
    check_resumed(folder, handed, calm)
