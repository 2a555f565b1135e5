"""Style, types and all tests, in two lanes side by side: there are two cores, and most tests wait for a process.

The second lane's output goes to build/tests-second-lane.log and is printed when it has ended. Ctrl-C ends both. The
exit code is 0 only if every step of both lanes ended with 0; a lane goes on after a step that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from belayer.ownership import cache_dir

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ["-m", "pytest", "--durations=15"]
FIRST = {"crash and integration": [*PYTEST, "tests/crash", "tests/integration", "tests/gpu"]}
SECOND = {
    "style": ["-m", "ruff", "check", "."],
    "layout": ["-m", "ruff", "format", "--check", "."],
    "types": ["-m", "pyright", "--pythonpath", sys.executable],
    # contract first: training, which unit tests import, tells TRL that there is no vLLM in this process
    "contract, unit and stateful": [*PYTEST, "tests/contract", "tests/unit", "tests/stateful"],
}


class Lane(threading.Thread):
    """Runs its steps one after another."""

    def __init__(self, steps: dict[str, list[str]], log: Path | None) -> None:
        super().__init__()
        self._steps = steps
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.results: dict[str, tuple[int, float]] = {}

    def run(self) -> None:
        out = self._log.open("wb") if self._log is not None else None
        for name, arguments in self._steps.items():
            if self.stopped:
                return
            began = time.monotonic()
            self._process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=out, stderr=out)
            self.results[name] = (self._process.wait(), time.monotonic() - began)

    def stop(self) -> None:
        self.stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)


def main() -> int:
    log = ROOT / "build" / "tests-second-lane.log"
    log.parent.mkdir(exist_ok=True)
    os.environ["BELAYER_CACHE"] = str(cache_dir())  # for programs of other environments, which set-up told nothing
    lanes = [Lane(FIRST, None), Lane(SECOND, log)]
    for lane in lanes:
        lane.start()
    try:
        for lane in lanes:
            while lane.is_alive():
                lane.join(0.5)
    except KeyboardInterrupt:
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join()
    sys.stdout.write(log.read_text(errors="replace"))
    for lane in lanes:
        for name, (code, seconds) in lane.results.items():
            print(f"{name:32} {'ok' if code == 0 else f'FAILED ({code})':12} {seconds:6.0f} s")
    complete = all(len(lane.results) == len(steps) for lane, steps in zip(lanes, (FIRST, SECOND), strict=True))
    return 0 if complete and not any(code for lane in lanes for code, _ in lane.results.values()) else 1


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
