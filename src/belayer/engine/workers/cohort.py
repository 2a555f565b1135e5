"""A worker and its children are one cohort: a child that is killed takes the whole of it down.

An engine that computes on several devices runs a child per rank. When one dies the others wait for it in a collective
operation, for minutes or for ever, and the worker's own step counter stands still. So the death is noticed here, at
once, even while the main thread is inside native code, and the worker ends; fencing then kills what is left of the
cohort, and a shadow takes over.

A child that ends by itself, with whatever status, is the business of the code that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading

RANK_DIED = 71  # exit status of a worker that lost a child

_DEADLY = (os.CLD_KILLED, os.CLD_DUMPED)


def watch() -> None:
    """Begin, in the main thread and after any fork. The process ends by itself when a child of it is killed."""
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    # Python's own handlers run between two instructions of the main thread, which may be minutes away; the byte to
    # this socket is written by the C handler, in whichever thread the signal arrives
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(theirs, ours), name="belayer-cohort", daemon=True).start()


def _wait(signals: socket.socket, _keep: socket.socket) -> None:
    while True:
        signals.recv(4096)
        for child in _children():
            with contextlib.suppress(ChildProcessError):  # somebody has waited for it already: it was expected
                # not reaped here: whoever started it may ask how it ended
                ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None and ended.si_code in _DEADLY:
                    name = signal.Signals(ended.si_status).name
                    print(f"child {child} of the cohort was killed by {name}", file=sys.stderr, flush=True)
                    os._exit(RANK_DIED)


def _children() -> list[int]:
    """Every child of this process, whichever thread started it, by the number it has for this process."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        # a thread that has just ended has no list any more
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children") as listed:
            found += map(int, listed.read().split())
    return [_own_number(child) for child in found]


def _own_number(pid: int) -> int:
    """The pid of `pid` in its own namespace: /proc shows a worker from an image the numbers of the host."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[-1]) for line in status if line.startswith("NSpid:"))
    return pid
