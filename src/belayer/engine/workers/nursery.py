"""The nursery: a process that has imported everything a worker needs and forks workers on request.

    python -m belayer.engine.workers.nursery CONTROL_FD DRIVER_PID BACKEND

Importing torch and vLLM costs seconds of processor time; a fork of a process that has done it costs milliseconds and
shares the memory. So worker and shadow start together for the price of one import, and the next shadow after a
promotion is there in about a second. The nursery itself stays single-threaded, runs no model and maps no weights.

It dies with the driver and its children die with it: an orphan cannot exist. If it is killed, worker and shadow go down
too; the driver starts another nursery and the requests continue as after any cold start.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys

import msgspec

from belayer.engine.memory.host import die_with_parent
from belayer.errors import EngineError


class Forked(msgspec.Struct, tag=True):
    """A child runs; its pidfd travels with the message."""

    pid: int


class Exited(msgspec.Struct, tag=True):
    """A child was reaped; `code` is as `subprocess.Popen.returncode`."""

    pid: int
    code: int


FromNursery = Forked | Exited
FORK = b"fork"  # with the descriptors of the child's channel, progress page and log


class Nursery:
    """Serves the control socket; a forked child leaves `serve` and returns its descriptors."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}  # pidfd: pid

    def serve(self) -> tuple[int, int, int]:
        while True:
            ready, _, _ = select.select([self._control, *self._children], [], [])
            for source in ready:
                if isinstance(source, int):
                    self._reap(source)
                    continue
                request, fds, _flags, _address = socket.recv_fds(self._control, 64, 3)
                if not request:
                    os._exit(0)  # the driver closed us
                if self._fork():
                    self._control.close()
                    return fds[0], fds[1], fds[2]
                for fd in fds:
                    os.close(fd)

    def _fork(self) -> bool:
        """Fork; True in the child."""
        if len(os.listdir("/proc/self/task")) != 1:
            # a lock held by a thread that the child does not have would stay locked for ever
            raise EngineError("a library started a thread while it was imported: workers cannot be forked")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setsid()  # its own process group: the cohort that is fenced together
            die_with_parent(parent)
            for pidfd in self._children:
                os.close(pidfd)
            return True
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        socket.send_fds(self._control, [msgspec.msgpack.encode(Forked(pid))], [pidfd])
        return False

    def _reap(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        os.close(pidfd)
        # children of the dead process are its cohort; not reaped yet, it still holds the number of their group
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it had none
        _pid, status = os.waitpid(pid, 0)
        self._control.send(msgspec.msgpack.encode(Exited(pid, os.waitstatus_to_exitcode(status))))


def main(argv: list[str]) -> None:
    control_fd, driver = int(argv[0]), int(argv[1])
    die_with_parent(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle; it closes us
    from belayer.engine import backends
    from belayer.engine.workers import worker

    backends.preload(argv[2])  # what this process is for

    gc.collect()
    gc.freeze()  # children share these pages; a collection there would touch, and so copy, all of them
    channel, progress, log = Nursery(socket.socket(fileno=control_fd)).serve()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    worker.run(channel, progress)


if __name__ == "__main__":
    main(sys.argv[1:])
