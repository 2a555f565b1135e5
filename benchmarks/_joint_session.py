"""The drivers of the joint campaign: a disk of their own, one process after another on it, and a watch on each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from belayer.errors import SandboxUnavailable
from belayer.ownership import RunLabel

from ._joint_driver import Spec
from ._joint_record import read_log

DISK_MIB = 512
LOGS = "logs"
SILENT_S = 75.0  # no record and no blow for so long, although there is work: it hangs
START_S = 400.0  # the same for a driver that has not begun: an image of the engine may have to be made first
HUNG = -1000  # no exit code, and no signal
ASKED_S = 2.0  # a driver that hangs has so long to say where
END_S = 30.0  # one that is told to end has so long


@contextmanager
def disk(label: RunLabel) -> Iterator[Path]:
    """A small disk for the run directories, that can be filled without hurting anybody; unmounted at the end."""
    point = label.dir / "disk"
    point.mkdir()
    point.with_name(LOGS).mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "belayer", str(point)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        raise SandboxUnavailable(
            f"no disk for the campaign can be mounted on {point}: {mounted.stderr.strip()}", next_step="run it as root"
        )
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=False, capture_output=True)


def beside(run: Path, suffix: str) -> Path:
    """A file about a round that a full disk does not concern."""
    return run.parent.with_name(LOGS) / f"{run.name}{suffix}"


class Session:
    """One driver from its start to its end. `hangs` is called with a driver that does, before it is killed."""

    def __init__(self, spec: Spec, label: RunLabel, hangs: Callable[[str], None]) -> None:
        self._run = Path(spec.run)
        self._log = Path(spec.log)
        self._hangs = hangs
        self._output = beside(self._run, ".out")
        self._begin = self._output.stat().st_size if self._output.exists() else 0
        self._told = len(read_log(self._log))
        told = beside(self._run, ".spec")
        told.write_bytes(msgspec.json.encode(spec))
        here = Path(__file__).resolve().parent
        # by the path and not by PYTHONPATH: that is a part of what an engine's image is good for
        program = f"import sys; sys.path.insert(0, {str(here.parent)!r}); from {here.name}._joint_driver import main"
        with open(self._output, "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{program}; sys.exit(main())", str(told)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | label.env,
            )

    def wait(self) -> int:
        """Its exit code; negative: the signal that it died of. `HUNG`: nothing happened in it, so it was killed."""
        begun = False
        last, since = -1, time.monotonic()
        while True:
            try:
                return self._process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
            begun = begun or any(entry["what"] == "ready" for entry in read_log(self._log)[self._told :])
            now = _size(self._log) + sum(_size(path) for path in (self._run / "journal").glob("*.seg"))
            patience_s = SILENT_S if begun else START_S
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > patience_s:
                self._ask_where()
                self._hangs(f"{self._run.name}: nothing happened for {patience_s:g} s")
                self._process.kill()
                self._process.wait()
                return HUNG

    def _ask_where(self) -> None:
        """It prints the stacks of its threads and tasks; see `_joint_driver`."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            self._process.send_signal(number)
        time.sleep(ASKED_S)

    @property
    def text(self) -> str:
        """Everything that it has said."""
        return self._output.read_bytes()[self._begin :].decode(errors="replace")

    def end(self) -> None:
        """Have it close its run; nothing happens if it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
