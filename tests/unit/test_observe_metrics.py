"""metrics.jsonl: what is written is read back, and nothing that lies in the file can stop the reader."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.events import LOG_CONTINUED, Event
from belayer.observe import MetricsLog, read_metrics, scan_metrics

pytestmark = pytest.mark.unit

_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc<&é", max_size=3), inner, max_size=3),
    max_leaves=8,
)
_events = st.builds(
    Event,
    kind=st.text(st.characters(exclude_categories=["Cs"])),
    subject=st.text(st.characters(exclude_categories=["Cs"])),
    at=st.floats(-1e12, 1e12),
    data=st.dictionaries(st.text('abc\n"', max_size=4), _plain, max_size=4),
)


def write(path: Path, events: list[Event]) -> None:
    with MetricsLog(path) as log:
        for event in events:
            log(event)


@settings(max_examples=60, deadline=None)
@given(st.lists(_events, max_size=12))
def test_what_is_written_is_read_back(events: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, events)
        assert read_metrics(path) == events
        assert path.read_bytes().count(b"\n") == len(events)


@settings(max_examples=60, deadline=None)
@given(st.lists(_events, min_size=1, max_size=6), st.data())
def test_a_torn_tail_loses_only_its_own_line_also_after_a_resume(events: list[Event], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, events)
        content = path.read_bytes()
        cut = data.draw(st.integers(1, len(content)))
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        torn = not content[:cut].endswith(b"\n")
        before = read_metrics(path)
        # A line that lacks nothing but its end is whole.
        assert before in (events[:whole], events[: whole + 1])
        write(path, events)
        after = scan_metrics(path)
        assert [one for one in after.events if one.kind != LOG_CONTINUED] == before + events
        assert after.unreadable == int(torn and len(before) == whole)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=60) | _events.map(lambda event: json.dumps({"kind": event.kind, "at": 1.0}).encode()))
)
def test_garbage_is_counted_and_left_out(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(b"\n".join(lines))
        found = scan_metrics(path)
        given_lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        assert len(found.events) + found.unreadable == len(given_lines)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"x"}',
        b'{"at":1}',
        b'{"kind":"x","at":"soon"}',
        b'{"kind":"x","at":1e999}',
        b'{"kind":"x","at":NaN}',
        b'{"kind":"x","at":1,"data":[]}',
        b'{"kind":"\xff","at":1}',
        b"[" * 100_000,
        b"null",
    ],
)
def test_lines_that_are_no_events(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b'\n{"kind":"good","at":5}\n')
    found = scan_metrics(path)
    assert [event.kind for event in found.events] == ["good"]
    assert found.unreadable == 1


class _Scalar:
    def item(self) -> float:
        return 0.25


def test_data_that_is_not_json_does_not_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = [{"a": Path("/x")}, {"a": _Scalar()}, {"a": "\ud800"}, {"a": 2**70}, {(1, 2): 3}, {"a": float("nan")}]
    write(path, [Event(kind="odd", at=1, data=data) for data in odd])  # type: ignore[arg-type]
    found = scan_metrics(path)
    assert found.unreadable == 0
    assert len(found.events) == len(odd)
    assert found.events[0].data == {"a": "/x"}
    assert found.events[1].data == {"a": 0.25}
    assert "ud800" in found.events[2].data["not_json"]


def test_lines_reach_the_file_within_the_interval_without_further_events(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, flush_s=0.1)
    log(Event(kind="one", at=1))
    deadline = time.monotonic() + 5
    while path.stat().st_size == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [event.kind for event in read_metrics(path)] == ["one"]
    log.close()
    log.close()
    log(Event(kind="late", at=2))
    assert log.dropped == 1


def test_what_was_flushed_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys, os, signal, pathlib\n"
        "from belayer.events import Event\n"
        "from belayer.observe.metrics import MetricsLog\n"
        "log = MetricsLog(pathlib.Path(sys.argv[1]), flush_s=30)\n"
        "log(Event(kind='kept', at=1)); log.flush(); log(Event(kind='lost', at=2))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    assert [event.kind for event in read_metrics(path)] == ["kept"]


def test_a_full_disk_costs_no_line_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    real = os.write
    room = [70]  # bytes that still fit: one line and a half

    def write_some(file: int, content: bytes) -> int:
        fits = min(room[0], len(content))
        if fits == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= fits
        return real(file, content[:fits])

    log = MetricsLog(path, flush_s=30)
    events = [Event(kind=f"event-{number}", at=number) for number in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr("belayer.observe.metrics.os.write", write_some)
        for event in events[:10]:
            log(event)
        log.flush()
        assert log.failure is not None and "No space" in log.failure
        for event in events[10:]:
            log(event)
        log.flush()
    assert path.stat().st_size == 70
    log.close()
    assert log.dropped == 0 and log.failure is None
    assert read_metrics(path) == events


def test_an_event_is_cheap(tmp_path: Path) -> None:
    event = Event(
        kind="span.generate", subject="step-3-2", data={"turn": 1, "tokens": 20, "start": 1.5, "wall_s": 0.25}
    )
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        begun = time.process_time()
        for _ in range(20_000):
            log(event)
        each = (time.process_time() - begun) / 20_000
    assert each < 50e-6, f"{each * 1e6:.1f} microseconds an event"
    assert log.dropped == 0
