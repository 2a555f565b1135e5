"""`belayer show` on a journal with everything in it, and after retention."""

from __future__ import annotations

import json

import pytest
from tests.unit.test_verify import story

from belayer import events as ev
from belayer.cli.show import show_command
from belayer.events import Event
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.observe import MetricsLog
from belayer.run_directory import RunDirectory

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path):
    def make(retention):
        folder = tmp_path / retention
        RunDirectory.open(folder, about={"config": {}}).close()
        journal = Journal(folder / "journal", retention=retention)
        records = story()
        journal.record(records[0])
        journal.record(r.PolicyChanged(rollout="x", k=0, policy="always", was="adaptive"))
        for record in records[1:]:
            journal.record(record)
        journal.close()
        return folder

    return make


def shown(run, capsys, *, as_json=False):
    assert show_command(run, "x", as_json=as_json) == 0
    return capsys.readouterr().out


def test_a_rollout_turn_by_turn(run, capsys):
    keep = run("keep")
    text = shown(keep, capsys)
    for needle in (
        "turn: ",
        "observation: ",
        "-> \"'one'\"",
        "checkpoint after action",
        "environment restored",
        "[void]",
    ):
        assert needle in text, needle
    assert "context cut before action 3: at token 8" in text
    assert "policy: always decides from here on, not adaptive" in text
    data = json.loads(shown(keep, capsys, as_json=True))
    assert data["state"] == "delivered" and data["results_gone"] == 0
    assert next(entry["ids"] for entry in data["entries"] if entry["kind"] == "turn") == [1, 2]


def test_what_retention_took_is_said_or_read_from_the_archive(run, capsys):
    dropped = shown(run("drop"), capsys)
    assert "bytes, not kept: the rollout was acknowledged]" in dropped and "'one'" not in dropped
    archive = run("archive")
    assert "-> \"'one'\"" in shown(archive, capsys)
    (file,) = (archive / "journal").glob("*.arc")
    file.write_bytes(file.read_bytes()[:-1])
    text = shown(archive, capsys)
    assert "in an archive that cannot be read" in text and f"{file} is damaged" in text
    assert show_command(archive, None, as_json=False) == 0
    out = capsys.readouterr().out
    assert "results of acknowledged rollouts were taken out of the journal by run.retention" in out


def test_recoveries_are_counted_where_events_are_recorded(run, capsys):
    folder = run("keep")
    assert show_command(folder, None, as_json=False) == 0
    assert "recoveries" not in capsys.readouterr().out
    with MetricsLog(folder / "metrics.jsonl") as log:
        for subject, what, how in (
            ("worker", "worker", "promotion"),
            ("x", "sandbox", "restore"),
            ("x", "sandbox", "restore"),
        ):
            log(Event(kind=ev.RECOVERED, subject=subject, data={"what": what, "how": how, "total_s": 0.1}))
    assert show_command(folder, None, as_json=False) == 0
    assert "3 recoveries: 2 of a sandbox by restore, 1 of a worker by promotion" in capsys.readouterr().out
