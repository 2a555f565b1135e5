"""Kills sandboxes at random, each by a clock of its own that runs while the sandbox lives: failures at a constant rate.

Every rollout has its own seeded sequence of gaps, so that two arms of an experiment have the same first failures at the
same ages. A rollout that takes longer, because it was started again, meets more of them, as it does in the world.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

from belayer.ownership.reap import label_of_process
from belayer.run import Run

TICK_S = 0.01


class Strikes:
    """`mtbf_s`: mean seconds of a sandbox's life between failures. Run `run()` as a task, cancel it at the end."""

    def __init__(self, run: Run, mtbf_s: float, seed: int) -> None:
        self._run, self._mtbf_s, self._seed = run, mtbf_s, seed
        self._random: dict[str, random.Random] = {}
        self._left: dict[str, float] = {}
        self.struck: Counter[str] = Counter()  # by rollout

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            for rollout, sandbox in self._run.living_sandboxes():
                if self.ages(rollout, now - before) and self._kill(sandbox.init_pid):
                    self.struck[rollout] += 1
            before = now

    def ages(self, rollout: str, seconds: float) -> bool:
        """Whether the rollout's sandbox fails within its next `seconds`."""
        rng = self._random.setdefault(rollout, random.Random(f"strikes {self._seed} {rollout}"))
        left = self._left.get(rollout)
        left = (rng.expovariate(1.0 / self._mtbf_s) if left is None else left) - seconds
        failed = left <= 0
        self._left[rollout] = rng.expovariate(1.0 / self._mtbf_s) if failed else left
        return failed

    def _kill(self, pid: int) -> bool:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if label_of_process(pid) != self._run.label.name:  # the number went to somebody else
                return False
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                return True
            return False
        finally:
            os.close(fd)
