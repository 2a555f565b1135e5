"""Run a program, and kill its protected sandbox once, when a file appears in it: `strike.py FILE[=BYTES] PROGRAM`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

from belayer.integrations import shared_host

DEADLINE_S = 120.0


def strike_when(path: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for sandbox in list(shared_host()._open.values()):
            current = sandbox.current
            if current is not None and not current.stale and (current.root / path.lstrip("/")).exists():
                os.kill(current.init_pid, signal.SIGKILL)
                threading.Thread(target=_tell, args=(sandbox,), daemon=True).start()
                return
        time.sleep(0.002)
    os.write(2, b"nothing to strike at\n")
    os._exit(3)


def _tell(sandbox) -> None:
    while not sandbox.restores:
        time.sleep(0.002)
    os.write(1, b"struck and restored\n")


if __name__ == "__main__":
    where, program = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    shared_host()  # opened here: two threads must not open it at once
    threading.Thread(target=strike_when, args=(where,), daemon=True).start()
    runpy.run_path(program, run_name="__main__")
