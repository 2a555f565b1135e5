"""A death is known before the kernel has taken the process apart, however it ended and however large it was."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from belayer.engine.workers import lifeline
from belayer.engine.workers.progress import Phase, Progress

pytestmark = pytest.mark.crash


def _holder(page: int, how: str) -> tuple[int, int]:
    """A process that holds the lifeline of `page` and ends as told; its pid and a descriptor that starts it."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        lifeline.hold(page)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        if how == "exit":
            os._exit(3)
        signal.signal(getattr(signal, how), signal.SIG_DFL) if how != "SIGKILL" else None
        os.kill(os.getpid(), getattr(signal, how))
        os._exit(99)
    assert os.read(ready[0], 1) == b"x"
    return pid, go[1]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "exit"])
def test_every_kind_of_end_breaks_it(how: str) -> None:
    page = Progress.create()
    pid, go = _holder(page, how)
    noticed = threading.Event()
    line = lifeline.Lifeline(page, noticed.set)
    line.watch()
    assert not noticed.wait(0.7)  # longer than the watcher's own look-up interval: a living process is not reported
    os.write(go, b"x")
    assert noticed.wait(5)
    os.waitpid(pid, 0)
    assert Progress(page).read() == (0, Phase.STARTING)  # the page's other half is untouched
    line.close()


def test_one_that_is_closed_tells_nobody() -> None:
    page = Progress.create()
    pid, go = _holder(page, "SIGKILL")
    noticed = threading.Event()
    line = lifeline.Lifeline(page, noticed.set)
    line.watch()
    line.close()
    os.write(go, b"x")
    os.waitpid(pid, 0)
    assert not noticed.wait(1.2)
    assert not any(thread.name == "belayer-lifeline" for thread in threading.enumerate())


def test_one_that_nobody_holds_reports_no_death() -> None:
    noticed = threading.Event()
    line = lifeline.Lifeline(Progress.create(), noticed.set)
    line.watch()
    assert not noticed.wait(0.7)
