"""`metrics.jsonl`: every event of a run as one line of JSON, in the order in which it was emitted.

The file is for people and for pictures. It is written behind the run's back: an event costs its encoding, a thread does
the writing, and a disk that fails costs lines, not the run (the journal is where a full disk stops a run).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from belayer.events import LOG_CONTINUED, Event
from belayer.observe._values import LARGEST

_log = logging.getLogger(__name__)
_KEEP_BYTES = 8 << 20  # unwritten lines that are kept while the disk refuses them
_WAKE_BYTES = 256 << 10
_open: set[tuple[int, int]] = set()  # device and inode of every file that a log of this process appends to


def is_recorded(path: Path) -> bool:
    """Whether a `MetricsLog` of this process writes to the file at `path`."""
    try:
        return _identity(path.stat()) in _open
    except OSError:
        return False


class MetricsLog:
    """An event sink that appends to `path`; a file that exists (a resumed run) is continued.

    Lines reach the file within `flush_s` seconds and on `close`. Where the disk refuses them they are kept, tried
    again, and past 8 MiB dropped: `dropped` counts those, `failure` says why. Raises `OSError` if the file cannot be
    opened.
    """

    def __init__(self, path: Path, *, flush_s: float = 1.0) -> None:
        self.path = path
        self.dropped = 0
        self.failure: str | None = None
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._lines: list[bytes] = []
        self._size = 0
        self._lock = threading.Lock()  # guards the three fields above; held for no longer than an append
        self._writing = threading.Lock()  # one writer at a time
        self._wake = threading.Event()
        self._closing = False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._torn = _ends_torn(self._file)
        self._identity = _identity(os.fstat(self._file))
        _open.add(self._identity)
        self._flush_s = flush_s
        self._thread = threading.Thread(target=self._work, name="belayer-metrics", daemon=True)
        self._thread.start()
        if os.fstat(self._file).st_size:
            self(Event(kind=LOG_CONTINUED))

    def __call__(self, event: Event) -> None:
        """Take one event. Never blocks on the disk and never raises because of what the event holds."""
        line = self._encode(event) + b"\n"
        with self._lock:
            if self._closing or self._size + len(line) > _KEEP_BYTES:
                self.dropped += 1
                return
            self._lines.append(line)
            self._size += len(line)
            full = self._size >= _WAKE_BYTES
        if full:
            self._wake.set()

    def flush(self) -> None:
        """Hand everything taken so far to the operating system (survives SIGKILL of this process)."""
        with self._writing:
            with self._lock:
                lines, self._lines, self._size = self._lines, [], 0
            if not lines:
                return
            content = (b"\n" if self._torn else b"") + b"".join(lines)
            written = 0
            try:
                while written < len(content):
                    written += os.write(self._file, content[written:])
                self._torn = False
                self.failure = None
            except OSError as error:
                self._refused(content, written, error)

    def close(self) -> None:
        """Flush and close. Events that come later are counted in `dropped`. Safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        self._thread.join(timeout=10)
        self.flush()
        with self._writing:
            _open.discard(self._identity)
            os.close(self._file)
        if self.dropped:
            _log.warning("%s lacks %d events (%s)", self.path, self.dropped, self.failure or "it was full for a while")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            self.flush()
            if self.failure is not None and not self._closing:
                time.sleep(self._flush_s)  # a buffer past its mark would otherwise spin on a full disk

    def _refused(self, content: bytes, written: int, error: OSError) -> None:
        """Keep what the disk did not take. A line that went in by half is written again, whole."""
        whole = content.rfind(b"\n", 0, written) + 1
        self._torn = written > whole if written else self._torn
        rest = content[whole:].lstrip(b"\n").splitlines(keepends=True)
        if self.failure is None:
            _log.warning("%s cannot be written: %s", self.path, error)
        self.failure = str(error)
        with self._lock:
            self._lines = rest + self._lines
            self._size += sum(map(len, rest))
            if self._closing:
                self.dropped += len(self._lines)
                self._lines, self._size = [], 0

    def _encode(self, event: Event) -> bytes:
        try:
            return self._encoder.encode(event)
        except (TypeError, ValueError, OverflowError, RecursionError):
            # Not JSON (a lone surrogate, a key that is no string, a huge integer): kept as its ASCII picture.
            return self._encoder.encode(
                Event(
                    kind=ascii(event.kind)[1:-1],
                    subject=ascii(event.subject)[1:-1],
                    at=event.at,
                    data={"not_json": ascii(event.data)[:2000]},
                )
            )


class Metrics(msgspec.Struct, frozen=True):
    """What `scan_metrics` found: the events, and how many lines are no events (`unreadable`)."""

    events: list[Event]
    unreadable: int


def scan_metrics(path: Path) -> Metrics:
    """Read a `metrics.jsonl`. Lines that hold no event, a torn last one above all, are counted and left out.

    Raises `FileNotFoundError` if there is no such file.
    """
    events: list[Event] = []
    unreadable = 0
    with open(path, "rb") as stream:
        for line in stream:
            if not line.strip():
                continue
            event = _parsed(line)
            if event is None:
                unreadable += 1
            else:
                events.append(event)
    return Metrics(events, unreadable)


class MetricsTail:
    """Reads a `metrics.jsonl` that grows: `read` returns the events of the lines that became whole since the last call.

    A file that is not there yet has no events.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def read(self) -> list[Event]:
        try:
            with open(self.path, "rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return []
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        found = [_parsed(line) for line in content[:whole].splitlines() if line.strip()]
        return [event for event in found if event is not None]


def read_metrics(path: Path) -> list[Event]:
    """The events of a `metrics.jsonl`; see `scan_metrics`."""
    return scan_metrics(path).events


class _Line(msgspec.Struct):
    """An event in the file: unlike `Event`, without its time it is none."""

    kind: str
    at: float
    subject: str = ""
    data: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Line)


def _parsed(line: bytes) -> Event | None:
    """The event in a line, or None where there is none."""
    try:
        found = _decoder.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):  # ValueError: bytes that are no UTF-8
        return None
    if not abs(found.at) <= LARGEST:
        return None
    return Event(kind=found.kind, subject=found.subject, at=found.at, data=found.data)


def _plain(value: object) -> object:
    item = getattr(value, "item", None)  # numpy and torch scalars
    return item() if callable(item) else str(value)


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
