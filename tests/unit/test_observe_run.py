"""A run of a user's own program: it records its events, and its configuration's `observe` section is honoured."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_root

from belayer import events as ev
from belayer.config import Config
from belayer.errors import ConfigError
from belayer.events import Event
from belayer.journal import records as r
from belayer.observe import MetricsLog, read_metrics
from belayer.observe.log_lines import LogLines
from belayer.observe.metrics import is_recorded
from belayer.observe.status import RunReader
from belayer.run import Run

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
from belayer.observe.prometheus import MetricsServer, RunMetrics

pytestmark = [pytest.mark.unit, needs_root]


class Stopped(Exception):
    pass


class WatchedRun(Run):
    """A run that, instead of starting an engine, looks at its own metrics."""

    page = ""
    url = ""

    async def _start(self, weights: object, policy_version: int) -> None:
        assert self.metrics_url is not None
        self.sink(Event(kind=ev.ROLLOUT_TRUNCATED, subject="a"))
        WatchedRun.url = self.metrics_url
        WatchedRun.page = await asyncio.to_thread(fetched, self.metrics_url)
        raise Stopped


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def config(port: int) -> Config:
    return Config.model_validate({"engine": {"model": "/nowhere"}, "observe": {"metrics_port": port}})


def test_metrics_are_served_from_before_the_engine_until_the_end(tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(Stopped):
        asyncio.run(WatchedRun.open(tmp_path / "run", config(0), sink=lambda event: seen.append(event.kind)))
    assert "belayer_rollouts_truncated_total 1.0" in WatchedRun.page
    assert 'belayer_run_info{run="run"' in WatchedRun.page
    assert seen == [ev.ROLLOUT_TRUNCATED], "the program's own sink still hears everything"
    with pytest.raises(OSError):
        urllib.request.urlopen(WatchedRun.url, timeout=10)


def test_a_port_that_is_taken_stops_the_run_before_anything_starts(tmp_path: Path) -> None:
    with MetricsServer(RunMetrics()) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match="metrics cannot be served"):
            asyncio.run(WatchedRun.open(tmp_path / "run", config(port)))
    with pytest.raises(Stopped):  # nothing holds the run directory any more
        asyncio.run(WatchedRun.open(tmp_path / "run", config(port)))


class IdleRun(Run):
    """A run without engine and sandboxes, for programs that find nothing left to do."""

    async def _start(self, weights: object, policy_version: int) -> None:
        self._told.phase("sandboxes")
        self._told.phase("engine")


RECOVERED = Event(
    kind=ev.RECOVERED,
    subject="worker",
    data={"what": "worker", "how": "promotion", "fault": "worker.exit", "phases": {"check_s": 0.004}, "total_s": 0.05},
)


def program(path: Path, *, over: bool = True, **options: Any) -> None:
    """One rollout, done before or half done; the program asks for it and leaves."""

    async def solve(rollout: Any) -> float:
        raise AssertionError("it must not be run again")

    async def main() -> None:
        async with await IdleRun.open(path, **options) as run:
            if run.journal.length == 0:
                run.journal.record(r.RolloutStarted(rollout="r-0-0", attempt=0, group="r-0", task="red", seed=1))
                if over:
                    run.journal.record(r.RolloutFinished(rollout="r-0-0", attempt=0, reward=1.0))
                    run.journal.record(r.Acknowledged(rollout="r-0-0", attempt=0))
            run.sink(RECOVERED)
            if over:
                assert [each async for each in run.rollouts(solve, ["red"])] == []

    asyncio.run(main())


def own(**observe: object) -> Config:
    return Config.model_validate({"engine": {"model": "/nowhere"}, "observe": observe})


def kinds(path: Path) -> list[str]:
    return [event.kind for event in read_metrics(path / "metrics.jsonl")]


def test_events_are_recorded_without_being_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run"
    program(path, config=own())
    phases = [ev.RUN_PHASE] * 3
    assert kinds(path) == [*phases, ev.RUN_STARTED, ev.RECOVERED, ev.RUN_FINISHED]
    status = RunReader(path).status()
    assert (status.state, status.ok, status.recoveries) == ("finished", True, {"worker": 1})
    program(path, config=own())
    events = read_metrics(path / "metrics.jsonl")
    assert [event.kind for event in events[6:]] == [
        ev.LOG_CONTINUED,
        *phases,
        ev.RUN_STARTED,
        ev.RECOVERED,
        ev.RUN_FINISHED,
    ]
    assert events[10].data["resumed"] is True


def test_a_program_that_leaves_rollouts_behind_has_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "run"
    program(path, config=own(), over=False)
    assert RunReader(path).status().state == "stopped"


def test_a_program_that_fails_has_not_finished(tmp_path: Path) -> None:
    async def main() -> None:
        async with await IdleRun.open(tmp_path / "run", own()):
            raise Stopped

    with pytest.raises(Stopped):
        asyncio.run(main())
    assert RunReader(tmp_path / "run").status().state == "stopped"


@pytest.mark.parametrize("fanned", [False, True])
def test_no_event_is_recorded_twice(tmp_path: Path, fanned: bool) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with MetricsLog(path / "metrics.jsonl") as log:
        program(path, config=own(), sink=ev.fan_out(log) if fanned else log)
    assert kinds(path).count(ev.RECOVERED) == kinds(path).count(ev.RUN_STARTED) == 1
    assert not is_recorded(path / "metrics.jsonl")


def test_the_record_can_be_turned_off(tmp_path: Path) -> None:
    program(tmp_path / "run", config=own(record=False))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_log_says_what_happens_to_who_does_not_listen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "belayer")
    program(tmp_path / "run", config=own())
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("WARNING", "recovered worker by promotion in 50 ms (ms: check 4)") in said
    text = "\n".join(line for level, line in said if level == "INFO")
    for words in (
        "preparing sandboxes",
        "starting the engine",
        "run: open after",
        "nothing left to do, all 1 rollouts",
    ):
        assert words in text
    caplog.clear()
    program(tmp_path / "other", config=own(), sink=lambda event: None)
    assert not [record for record in caplog.records if "recovered" in record.getMessage()], "its sink has heard it"


def test_recoveries_are_seen_where_no_log_is_configured() -> None:
    """As Python prints warnings: on standard error, and nothing of what is only information."""
    code = "from tests.unit.test_observe_run import RECOVERED, LogLines, Event\n"
    code += "lines = LogLines('mine'); lines(Event(kind='run.phase', subject='sandboxes')); lines(RECOVERED)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "recovered worker by promotion in 50 ms (ms: check 4)\n" and done.stdout == ""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"state": "building"}, "being made"),
        ({"state": "built", "nbytes": 210 << 20}, "made (210 MB)"),
        ({"state": "cut off"}, "belayer prepare"),
        ({"state": "none", "reason": "there is no CRIU"}, "there is no CRIU"),
    ],
)
def test_images_of_the_engine_are_in_the_log(
    data: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "belayer")
    LogLines("mine")(Event(kind=ev.ENGINE_IMAGE, subject="image", data=data))
    assert words in caplog.text
