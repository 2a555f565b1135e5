"""Whose turn is it to dump? One order for all runs of a host.

Dumps share the host's processors, memory bandwidth and disk with everything else, so only a few run at once, whatever
the number of runs. Within a run, those whose agent waits already (*promoted*) go first, then in the order of arrival.
Among runs, one that has a promoted checkpoint goes before those that have none.

A turn is always in one of these states:

    WAITING    nothing has begun
    PROMOTED   nothing has begun, and its agent waits
    BEGUN      it dumps
    OVER       it has ended, however
    ABANDONED  it was given up before it had begun

Forbidden: BEGUN → ABANDONED. A dump that is cut off may leave its own code in the processes.

The order among runs is made of locks (flock) on files of one folder, which the kernel drops with their holder: a killed
run blocks nobody. A run that was stopped does, and one that is busy may, so no run waits for the others longer than
`PATIENCE_S`, or `URGENT_PATIENCE_S` while an agent waits: the limit is a courtesy to others. Its own dumps a run always
lets end first: many at once take each other's processors, and all of their agents wait. A run that has dumped lets
others go first.

A turn that has waited is asked once more when it comes (`wanted`): the moment is another one than that of the decision.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from belayer.errors import CheckpointAbandoned
from belayer.ownership.labels import RUNTIME_DIR

PATIENCE_S = 2.0
URGENT_PATIENCE_S = 0.3
RETRY_S = 0.005
YIELD_S = 0.02
_WRITE_RETRY_S = 0.05
_USERS, _URGENT, _WAITING, _WRITE = "users", "urgent", "waiting", "write"
_FILES = (_URGENT, _WAITING, _WRITE, _USERS)  # the last one is the last to be removed


class TurnState(enum.Enum):
    WAITING = "waiting"
    PROMOTED = "promoted"
    BEGUN = "begun"
    OVER = "over"
    ABANDONED = "abandoned"


class Turn:
    """The place of one checkpoint in the order."""

    def __init__(self) -> None:
        self.state = TurnState.WAITING
        self.waited_s = 0.0
        self.changed: Callable[[], object] = lambda: None  # set by the order in which it stands
        self.began: Callable[[], object] = lambda: None  # called when it begins
        # asked before it begins beside so many dumps of its own run, unless it is promoted. If not even alone, it is
        # given up
        self.wanted: Callable[[int], bool] = lambda beside: True
        self.ahead: Callable[[], float] = lambda: 0.0  # lengths of a dump until it begins, if it is promoted now

    @property
    def open(self) -> bool:
        """Has nothing begun yet?"""
        return self.state in (TurnState.WAITING, TurnState.PROMOTED)

    def promote(self) -> bool:
        """Its agent waits: go before all that wait only for their model. False: it is not waiting any more."""
        if self.state is TurnState.WAITING:
            self.state = TurnState.PROMOTED
            self.changed()
        return self.open

    def abandon(self) -> bool:
        """Give it up. False: it has begun, or is over."""
        if not self.open:
            return False
        self.state = TurnState.ABANDONED
        self.changed()
        return True


class Turns:
    """The order of one run, and its part in that of the host. Belongs to one event loop."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        at_once: int,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """`folder` is the same for all runs of a host. `clock` and `later` (as `loop.call_later`) for tests."""
        self._clock = clock
        self._later = later or (lambda delay, work: asyncio.get_running_loop().call_later(delay, work))
        self._waiting: list[tuple[Turn, float, asyncio.Future[int]]] = []
        self._at_once = at_once
        self._begun = 0  # dumps of this run under way
        self._retrying = False
        self._yields_until = 0.0
        self._locks = _Locks(folder or RUNTIME_DIR / "turns", at_once)

    @asynccontextmanager
    async def taken(self, turn: Turn) -> AsyncIterator[None]:
        """The block runs when it is this turn. Raises `CheckpointAbandoned` when it was given up before."""
        slot = await self._wait(turn)
        try:
            yield
        finally:
            turn.state = TurnState.OVER
            self._end(slot)
            if self._locks.others_wait():
                self._yields_until = self._clock() + YIELD_S
            self._advance()

    async def _wait(self, turn: Turn) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = (turn, self._clock(), future)
        turn.changed, turn.ahead = self._advance, lambda: self._ahead(turn)
        self._waiting.append(entry)
        try:
            self._advance()
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._end(future.result())  # cancelled just as its turn had come
            raise
        finally:
            turn.changed, turn.ahead = lambda: None, lambda: 0.0
            if entry in self._waiting:
                self._waiting.remove(entry)
            self._advance()

    def _advance(self) -> None:
        """Let begin whoever can."""
        for entry in [entry for entry in self._waiting if entry[0].state is TurnState.ABANDONED]:
            self._waiting.remove(entry)
            if not entry[2].done():
                entry[2].set_exception(CheckpointAbandoned("it was given up before it had begun"))
        while self._waiting:
            # stable: in each class the order of arrival
            turn, since, future = first = min(self._waiting, key=lambda entry: entry[0].state is TurnState.WAITING)
            waited, urgent = self._clock() - since, turn.state is TurnState.PROMOTED
            if not urgent and self._begun and self._begun < self._at_once and not turn.wanted(self._begun):
                break  # it would rather be alone, and those that have begun end by themselves
            whatever = not self._begun and waited >= (URGENT_PATIENCE_S if urgent else PATIENCE_S)
            yields = self._clock() < self._yields_until and not whatever
            slot = None if yields else self._locks.take(urgent=urgent, whatever=whatever)
            self._locks.waits(slot is None)
            if slot is None:
                if not self._retrying:
                    self._retrying = True
                    self._later(RETRY_S, self._retry)
                return
            self._waiting.remove(first)
            self._begun += 1
            if not urgent and self._begun == 1 and not turn.wanted(0):
                turn.state = TurnState.ABANDONED
                self._end(slot)
                if not future.done():
                    future.set_exception(CheckpointAbandoned("when its turn came it did not pay any more"))
                continue
            turn.state, turn.waited_s = TurnState.BEGUN, waited
            if future.done():
                self._end(slot)
            else:
                turn.began()
                future.set_result(slot)
        self._locks.nobody_is_urgent()
        self._locks.waits(False)

    def _end(self, slot: int) -> None:
        self._begun -= 1
        self._locks.release(slot)

    def _ahead(self, turn: Turn) -> float:
        before = self._begun + sum(
            other.state is TurnState.PROMOTED for other, *_ in self._waiting if other is not turn
        )
        return max(0, before + 1 - self._at_once) / self._at_once

    def _retry(self) -> None:
        self._retrying = False
        self._advance()

    @contextmanager
    def writing(self, check: Callable[[], None]) -> Iterator[None]:
        """In a thread: the block runs while no other run of the host writes checkpoints to the disk, or after a while.

        `check` is called meanwhile; what it raises ends the wait.
        """
        with self._locks.writing(check):
            yield

    def close(self) -> None:
        """Let go of the folder, and remove it if nobody else uses it. No turn is under way."""
        self._locks.close()


class _Locks:
    """Files in a folder that all runs of the host share."""

    def __init__(self, folder: Path, at_once: int) -> None:
        self._folder = folder
        self._users = self._join()
        self._slots = [self._open(f"dump-{number}") for number in range(at_once)]
        # of each of these one descriptor to say it, and one to ask whether others say it
        self._urgent, self._asks_urgent = self._open(_URGENT), self._open(_URGENT)
        self._waiting, self._asks_waiting = self._open(_WAITING), self._open(_WAITING)
        self._write = self._open(_WRITE)
        self._held: set[int] = set()
        self._is_urgent = self._waits = False

    def _join(self) -> int:
        while True:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                fd = self._open(_USERS)
                fcntl.flock(fd, fcntl.LOCK_SH)
                # whoever was the last user may have removed it between the two calls
                with suppress(FileNotFoundError):
                    if os.fstat(fd).st_ino == os.stat(self._folder / _USERS).st_ino:
                        return fd
                os.close(fd)

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, *, urgent: bool, whatever: bool) -> int | None:
        """A slot, or None. `whatever`: also when none is free (then it is -1)."""
        if urgent and not self._is_urgent:
            self._is_urgent = _try(self._urgent, fcntl.LOCK_SH)
        elif not urgent:
            self.nobody_is_urgent()
            if not whatever and self._others_are_urgent():
                return None
        for number, fd in enumerate(self._slots):
            if number not in self._held and _try(fd, fcntl.LOCK_EX):
                self._held.add(number)
                return number
        return -1 if whatever else None

    def release(self, slot: int) -> None:
        if slot >= 0:
            self._held.discard(slot)
            fcntl.flock(self._slots[slot], fcntl.LOCK_UN)

    def nobody_is_urgent(self) -> None:
        if self._is_urgent:
            fcntl.flock(self._urgent, fcntl.LOCK_UN)
            self._is_urgent = False

    def _others_are_urgent(self) -> bool:
        return not _free(self._asks_urgent)

    def waits(self, yes: bool) -> None:
        """Say whether this run waits for a slot."""
        if yes != self._waits:
            self._waits = _try(self._waiting, fcntl.LOCK_SH) if yes else bool(fcntl.flock(self._waiting, fcntl.LOCK_UN))

    def others_wait(self) -> bool:
        """Does another run? Forgets that this one does."""
        self.waits(False)
        return not _free(self._asks_waiting)

    @contextmanager
    def writing(self, check: Callable[[], None]) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        while not (mine := _try(self._write, fcntl.LOCK_EX)) and time.monotonic() < deadline:
            check()
            time.sleep(_WRITE_RETRY_S)
        try:
            yield
        finally:
            if mine and self._users >= 0:  # a disk that hung may outlive the run's own end
                fcntl.flock(self._write, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._users < 0:
            return
        # those who come now wait for this lock, and then see that the file is not there any more
        if _try(self._users, fcntl.LOCK_EX):
            for path in (*self._folder.glob("dump-*"), *(self._folder / name for name in _FILES)):
                path.unlink(missing_ok=True)
            with suppress(OSError):
                self._folder.rmdir()
        for fd in (*self._slots, self._urgent, self._asks_urgent, self._waiting, self._asks_waiting, self._write):
            os.close(fd)
        os.close(self._users)
        self._users = -1


def _try(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free(fd: int) -> bool:
    """Does nobody hold this file's lock? (Holds it for an instant.)"""
    if not _try(fd, fcntl.LOCK_EX):
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
