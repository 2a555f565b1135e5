"""A run of a user's own program: its configuration's `observe` section is honoured without the command line."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest
from tests.conftest import needs_root

from belayer import events as ev
from belayer.config import Config
from belayer.errors import ConfigError
from belayer.events import Event
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
