"""Process 1 of an image, and the pid namespace around it. A program without imports of ours, for it is in every image.

    python -I -S _init.py PARENT_PID COMMAND...

Outside it makes the namespace and waits for its end; inside it starts COMMAND as process 2, reaps what is left to it,
and ends as COMMAND does. Process 1 of a namespace ignores signals that would end any other process, so COMMAND is not
process 1 itself. A signal becomes exit status 128 + signal. When process 1 ends, the kernel ends the whole namespace.

A restored process 1 has no parent to die with until it is told so by SIGUSR1: one that died while CRIU holds the others
as their tracer would wait for CRIU to let go of them, and CRIU for it to end, for ever.
"""

import ctypes
import os
import signal
import sys

_CLONE_NEWPID = 0x20000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Asked of the kernel, for whoever is its parent then."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")


def main(parent: int, command: list[str]) -> None:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if _libc.unshare(_CLONE_NEWPID):
        sys.exit(f"no pid namespace can be made here: {os.strerror(ctypes.get_errno())}")
    init = os.fork()
    if init:
        os.closerange(3, 1024)
        _pid, status = os.waitpid(init, 0)
        os._exit(max(0, os.waitstatus_to_exitcode(status)))
    os.setsid()
    signal.signal(signal.SIGUSR1, lambda *_: die_with_parent())
    die_with_parent()
    worker = os.fork()
    if not worker:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.setsid()  # its own process group: the cohort that is fenced together
        die_with_parent()
        os.execv(command[0], command)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 1024)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
