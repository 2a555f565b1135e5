"""Starting and ending the engine's processes, seen from the driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from belayer.ownership import RunLabel

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def environment(label: RunLabel, threads: int, batch_invariant: bool) -> dict[str, str]:
    """Environment of owner and workers."""
    count = str(threads or os.cpu_count() or 1)
    env = os.environ | label.env | dict.fromkeys(_THREAD_VARIABLES, count)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]))
    env |= {
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",  # NumPy's; it would start threads at import, and then nothing may be forked
        "HF_HUB_OFFLINE": "1",  # models are folders
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process more costs seconds at start and a place more to fail
        "TORCHDYNAMO_DISABLE": "1",  # otherwise logprobs compile for 16 s
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for a GPU must not initialise CUDA, or nothing may be forked
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same product gives the same bits every time
    }
    # compute threads that spin while they wait for one another run 5 to 20 times slower on a machine that is busy,
    # and this one is: trainer, sandboxes and shadow share its cores
    env.setdefault("OMP_WAIT_POLICY", "passive")
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if batch_invariant:
        env["MKL_CBWR"] = "AVX2"  # one summation order for every batch size (from 4 rows on)
        env["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # the same for attention
    return env


class Child:
    """One process of the engine, watched by pidfd and fenced by SIGKILL, whoever its parent is.

    `exit_code` tells how it ended, once it has; None if that cannot be known.
    """

    def __init__(self, pid: int, pidfd: int, log: Path, exit_code: Callable[[], int | None]) -> None:
        self.pid = pid
        self.log = log
        self._pidfd = pidfd
        self._exit_code = exit_code
        self._exited = asyncio.Event()
        self._how = "running"
        self._on_exit: Callable[[str], None] | None = None
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    @classmethod
    def spawn(cls, module: str, arguments: list[str], fds: list[int], env: dict[str, str], log: Path) -> Child:
        """Start a Python module; from the thread whose end shall end the process."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=fds,
                start_new_session=True,  # its own process group: the cohort that is fenced together
            )

        def reap() -> int:
            # children of the dead process are its cohort; not reaped yet, it still holds the number of their group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            return popen.wait()

        return cls(popen.pid, os.pidfd_open(popen.pid), log, reap)

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with how the process ended, as soon as the kernel says so."""
        self._on_exit = callback
        if self._exited.is_set():
            callback(self.exit_text())

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._exit_code()
        if code is None:
            self._how = "ended"
        elif code < 0:
            self._how = f"killed by {signal.Signals(-code).name}"
        else:
            self._how = f"exit status {code}"
        self._exited.set()
        if self._on_exit is not None:
            self._on_exit(self._how)

    @property
    def alive(self) -> bool:
        return not self._exited.is_set()

    def exit_text(self) -> str:
        """How it ended, or "running"."""
        return self._how

    def kill(self) -> None:
        """SIGKILL the whole cohort, stopped ones too; the exit is reported as usual."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and its cohort with it
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                os.killpg(self.pid, signal.SIGKILL)

    def hurry(self) -> None:
        """Take back a niceness that the process was started with."""
        with contextlib.suppress(OSError):  # it just ended, or this user may not
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)

    async def gone(self, timeout_s: float) -> bool:
        """Wait until it is reaped. False: it was not within `timeout_s` (a task stuck in the kernel)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            return False
        return True

    def log_tail(self, lines: int = 12) -> str:
        """The end of its output, for error messages."""
        try:
            text = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(f"    {line}" for line in text[-lines:]) or "    (no output)"
