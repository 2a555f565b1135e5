"""One driver of the joint campaign: opens a run, rolls out, hands over, and is struck.

Its argument is a file with a `Spec`. It ends with 0 when every rollout is acknowledged, with 75 when
the disk was full, and else not by itself or with a traceback. The campaign starts another one on the same run directory
until one ends with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from belayer import events
from belayer.config import Config
from belayer.errors import BelayerError, EngineError, StorageFull
from belayer.faults.joint_kinds import JointFault
from belayer.run import Run

from ._joint_strikes import Log, Strikes
from ._joint_task import Outcome, digest, solve, tasks

DISK_FULL = 75
_PR_SET_PDEATHSIG = 1
FILLER = "filler"


class Spec(msgspec.Struct):
    """What a driver is told. `faults` is empty for the undisturbed run."""

    run: str
    config: dict[str, Any]
    model: dict[str, Any]  # as `_models.Model`; that module costs an import of torch
    rollouts: int
    seed: int
    log: str
    faults: list[JointFault] = []
    lives_s: float = 0.0  # before a fault may end it


async def drive(spec: Spec) -> None:
    config = Config.model_validate(spec.config)
    log = Log(Path(spec.log))
    log.write("started")
    images: list[str] = []

    def sink(event: events.Event) -> None:
        if event.kind == events.ENGINE_IMAGE:
            images.append(f"{event.data['state']} {event.data.get('reason', '')}".strip())

    run = await Run.open(spec.run, config, sink=sink)
    async with run:
        engine = run.engine
        assert engine is not None
        log.write("opened", label=run.label.name, pid=os.getpid(), usage=usage())
        with contextlib.suppress(EngineError):
            await engine.wait_standby(config.engine.start_timeout_s)
        log.write("ready", images=images)
        same: dict[str, Any] = {}

        async def update() -> None:
            if not same:
                same.update(await asyncio.to_thread(_weights, spec.model))
            with contextlib.suppress(EngineError):
                await run.update_weights(same.items(), engine.policy_version + 1)

        def fill() -> None:
            filler = os.open(Path(spec.run).parent / FILLER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                block = b"\0" * (1 << 20)
                while block:
                    try:
                        while True:
                            os.write(filler, block)
                    except OSError:
                        block = block[: len(block) // 16]
            finally:
                os.close(filler)

        strikes = Strikes(run, spec.faults, log, update=update, fill=fill, lives_s=spec.lives_s)
        striking = asyncio.create_task(strikes.run())
        try:
            async for done in run.rollouts(solve, tasks(spec.rollouts, spec.seed), name="j"):
                outcome = Outcome(
                    rollout=done.rollout_id,
                    attempt=done.attempt,
                    reward=done.reward,
                    tokens=len(done.token_ids),
                    turns=done.turns,
                    digest=digest(done.token_ids, done.loss_mask, done.logprobs),
                    fickle=done.task["fickle"],
                )
                log.write("delivered", outcome=msgspec.to_builtins(outcome))
                run.acknowledge(done)
                log.write("acknowledged", rollout=done.rollout_id)
                if striking.done():
                    striking.result()  # a hand that fails is a bug that must not pass as calm
        finally:
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
        log.write("done", usage=usage())


def _weights(model: dict[str, Any]) -> dict[str, Any]:
    """The tensors that the engine has already."""
    from ._models import Model, weights

    return dict(weights(msgspec.convert(model, Model)))


def usage() -> dict[str, int]:
    """Descriptors, threads and resident MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def _say_where() -> None:
    """On SIGUSR1, every task's stack goes to the driver's output: the campaign asks a driver that hangs."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    loop = asyncio.get_running_loop()

    def tell() -> None:
        for task in asyncio.all_tasks(loop):
            print(f"task {task.get_name()}", file=sys.stderr)
            task.print_stack(file=sys.stderr)
        sys.stderr.flush()

    loop.add_signal_handler(signal.SIGUSR2, tell)


def main() -> int:
    # a campaign that is killed takes its driver with it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)

    async def work() -> None:
        _say_where()
        task = asyncio.ensure_future(drive(spec))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task

    try:
        asyncio.run(work())
    except StorageFull as error:
        print(error, file=sys.stderr)
        return DISK_FULL
    except BelayerError as error:
        traceback.print_exc()
        Log(Path(spec.log)).write("error", error=type(error).__name__, why=error.what)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
