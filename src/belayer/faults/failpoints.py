"""Named places in the code at which a campaign or a test can make something go wrong, exactly there.

    hit("engine.update.before_commit")      in the code: costs one truth test while nothing is armed
    arm("engine.update.after_shard", f, skip=2)   in this process: calls `f` at the third passage
    BELAYER_FAILPOINTS="engine.update.begin=kill engine.update.after_shard+2=stop"   in a process that will be started

A point fires once and is then disarmed: what a recovery does at the same place is not hit again unless it is armed
again. Points are armed and fire in any thread. Every name is listed in `NAMES`; another one is refused when it is
armed, and when it is hit while something is armed, so a point that was renamed cannot silently test nothing.

The idea is that of FreeBSD's fail(9).
"""

# The owner and the workers import this module too: nothing from outside the standard library, nothing of ours.

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

ENV_VAR = "BELAYER_FAILPOINTS"

NAMES = {
    "turn.begin": "driver: the function has asked for a model turn, nothing of it was sent",
    "turn.tokens": "driver: tokens have come from the engine, they are not journalled",
    "turn.journalled": "driver: they are journalled, nobody has seen them",
    "turn.end": "driver: the turn is complete, the function does not have it yet",
    "action.chosen": "driver: an action was asked for and its environment is ready, nothing is journalled",
    "action.intended": "driver: the intent is journalled, nothing was sent",
    "action.sent": "driver: the command was sent to the sandbox and runs there",
    "action.performed": "driver: its result is here, the completion is not journalled",
    "action.completed": "driver: the completion is journalled, the function does not have the result",
    "sandbox.create.place": "driver: the root of a new container is ready, it has no processes",
    "sandbox.create.answered": "driver: a new container has answered, nobody has it yet",
    "checkpoint.begin": "driver: a checkpoint was decided on, nothing of it was done",
    "checkpoint.frozen": "driver: every process is dumped and still frozen, there is no snapshot",
    "checkpoint.journal.before": "driver: a checkpoint is published and found good, the journal has not heard of it",
    "checkpoint.journal.after": "driver: it has",
    "restore.begin": "driver: a lost environment is to be restored, nothing was done",
    "restore.place": "driver: the root of the restored container is ready, its processes are not",
    "restore.processes": "driver: its processes are back, they were not asked anything",
    "restore.answered": "driver: it has answered and is verified, nobody has it yet",
    "restore.fresh": "driver: no checkpoint could be restored, a new container is to be made",
    "replay.begin": "driver: an environment is back, actions are to be done again",
    "replay.action": "driver: one of them was done again, its observation is not compared",
    "replay.end": "driver: all are done again, the restore is not journalled",
    "restore.journalled": "driver: the restore is journalled, nothing was done since",
    "truncate.before": "driver: the context is to be cut, nothing is journalled",
    "truncate.after": "driver: the cut is journalled, the function was not run again",
    "rollout.returned": "driver: the function has returned its reward, which is not journalled",
    "rollout.finished": "driver: the reward is journalled, nobody has the trajectory",
    "deliver.before": "driver: a trajectory is about to be handed over",
    "acknowledge.before": "driver: the trainer has used it, which is not journalled",
    "acknowledge.after": "driver: the acknowledgement is journalled, the trainer does not know",
    "journal.append.before": "driver: a record is to be written, nothing of it is on disk",
    "journal.append.after": "driver: it is written, memory has not heard of it",
    "journal.segment.created": "driver: the file of the next segment exists, without its header",
    "journal.segment.headed": "driver: it has its header, and no record",
    "journal.archive.written": "driver, retention: results are in an archive under its temporary name",
    "journal.archive.renamed": "driver, retention: the archive has its name, the segment has the results too",
    "journal.compact.written": "driver, retention: the shorter segment is on disk under its temporary name",
    "journal.compact.renamed": "driver, retention: it has replaced the longer one",
    "engine.update.begin": "driver: the owner has begun a dirty epoch, nothing is written yet",
    "engine.update.after_shard": "driver: one tensor of the new epoch is written (use `skip` for a later one)",
    "engine.update.before_commit": "driver: everything is written, the epoch is still dirty",
    "engine.update.after_commit": "driver: the owner has committed, no worker knows yet",
    "engine.update.between_switches": "driver: the worker has switched (or was told to), the shadow has not",
    "engine.update.switched": "driver: worker and shadow use the new epoch, the caller has not been told",
    "checkpoint.publish.captured": "driver: images in memory and snapshot are complete, there is no manifest",
    "checkpoint.publish.written": "driver: a manifest is written under its temporary name (also one that is replaced)",
    "checkpoint.publish.renamed": "driver: it has its name, the folder is not synchronised",
    "checkpoint.write.begin": "driver, background: nothing of the images is on disk",
    "checkpoint.write.file": "driver, background: one image file is on disk, under a temporary folder",
    "checkpoint.write.copied": "driver, background: all of them are, still under a temporary folder",
    "checkpoint.write.renamed": "driver, background: the folder has its name, the manifest says `process`",
    "checkpoint.write.published": "driver, background: the manifest says `host`",
    "checkpoint.move.copied": "driver or reaper: images are copied to disk to free memory, under a temporary folder",
    "checkpoint.move.renamed": "driver or reaper: they have their name there, and are in memory too",
    "checkpoint.remove.manifest": "driver: the manifest of a checkpoint is deleted, its images and snapshot are not",
    "checkpoint.remove.images": "driver: manifest and images are deleted, the snapshot is not",
    "checkpoint.export.images": "export: the process images are in the archive, which has no name yet",
    "checkpoint.export.tree": "export: the file system is too",
    "checkpoint.import.images": "import: the process images are unpacked, there is no manifest",
    "checkpoint.import.tree": "import: the file system is too",
}

Action = Callable[[], None]


class FailpointError(Exception):
    """What the action `raise` raises: an error of a kind that no code expects."""


class _Armed:
    def __init__(self, action: Action, skip: int) -> None:
        self.action = action
        self.skip = skip


_lock = threading.Lock()
_armed: dict[str, _Armed] = {}  # empty nearly always, and `hit` looks at nothing else
_fired: list[str] = []
_here = threading.local()


def hit(name: str, subject: str = "") -> None:
    """The code has come to the point `name`; whatever is armed there happens now.

    `subject`: whom it is about (a rollout, a sandbox), for an action that asks with `subject()`.
    """
    if _armed:
        _strike(name, subject)


def subject() -> str:
    """Within an action: what the point that it fires at is about; empty where the code does not say."""
    return getattr(_here, "subject", "")


def _strike(name: str, about: str) -> None:
    _check(name)
    with _lock:
        armed = _armed.get(name)
        if armed is None:
            return
        if armed.skip > 0:
            armed.skip -= 1
            return
        del _armed[name]
        _fired.append(name)
    _here.subject = about
    armed.action()


def arm(name: str, action: Action | str, *, skip: int = 0) -> None:
    """Have `action` happen once at `name`, after it was passed `skip` times.

    A callable is called in the thread that comes by, and what it raises is raised there. A string is one of `kill`,
    `segv`, `abort`, `stop` (that signal to this process), `raise` (a `FailpointError`), `sleep:SECONDS`.
    Raises `ValueError` for an unknown name or action.
    """
    _check(name)
    with _lock:
        _armed[name] = _Armed(_action(action) if isinstance(action, str) else action, skip)


def disarm(name: str) -> bool:
    """Take back what `arm` did. False: it has fired already, or was never armed."""
    with _lock:
        return _armed.pop(name, None) is not None


@contextlib.contextmanager
def armed(name: str, action: Action | str, *, skip: int = 0) -> Iterator[None]:
    """`arm` for the length of a block."""
    arm(name, action, skip=skip)
    try:
        yield
    finally:
        disarm(name)


def take_fired() -> list[str]:
    """Names of the points that fired since the last call, in their order."""
    with _lock:
        fired, _fired[:] = list(_fired), []
    return fired


def arm_from_environment(text: str | None = None) -> None:
    """Arm what `$BELAYER_FAILPOINTS` asks for: `name[+skip]=action`, separated by spaces. Called at import.

    Raises `ValueError` for anything it does not understand: a process that was to fail shall not pass.
    """
    for entry in (os.environ.get(ENV_VAR, "") if text is None else text).split():
        place, equals, action = entry.partition("=")
        name, _plus, skip = place.partition("+")
        if not equals or not (skip or "0").isdigit():
            raise ValueError(f"{ENV_VAR}: {entry!r} is not name[+skip]=action")
        arm(name, action, skip=int(skip or 0))


def _check(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"no failpoint is called {name}; known: {', '.join(NAMES)}")


_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}


def _action(text: str) -> Action:
    if text in _SIGNALS:
        return lambda: os.kill(os.getpid(), _SIGNALS[text])
    if text == "raise":
        return _raise
    kind, _colon, seconds = text.partition(":")
    if kind == "sleep":
        duration = float(seconds)
        return lambda: time.sleep(duration)
    raise ValueError(f"unknown failpoint action {text!r}")


def _raise() -> None:
    raise FailpointError("an armed failpoint")


arm_from_environment()
