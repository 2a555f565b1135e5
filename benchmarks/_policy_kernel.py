"""A small discrete-event kernel: a clock, processes that are generators, and a disk that its users share equally.

A process yields seconds to sleep, `Write(bytes)` to use the disk, or an `Event` to wait for. It can be stopped at any
moment; what it was waiting for is given up then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

Body = Generator["float | Write | Event", Any, None]


@dataclass(frozen=True)
class Write:
    """Use the disk for so many bytes, read or written."""

    nbytes: float


@dataclass
class _Timer:
    call: Callable[[], None] | None


@dataclass
class Event:
    """Something that happens once; `value` is what the waiting process gets."""

    happened: bool = False
    value: Any = None
    waiting: list[Callable[[Any], None]] = field(default_factory=list)

    def set(self, value: Any = None) -> None:
        if self.happened:
            return
        self.happened, self.value = True, value
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call(value)


class Clock:
    """Calls functions at their times, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, _Timer]] = []
        self._count = 0

    def at(self, when: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(call)
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, timer))
        return timer

    def run(self, until: Callable[[], bool]) -> None:
        while self._heap and not until():
            self.now, _, timer = heapq.heappop(self._heap)
            if timer.call is not None:
                timer.call()


class Disk:
    """Processor sharing: n users get a bandwidth of 1/n each. Virtual time passes at the rate of one user's share."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock = clock
        self._rate = bytes_per_s
        self._virtual = 0.0
        self._seen = 0.0
        self._jobs: list[tuple[float, int, _Timer]] = []
        self._count = 0
        self._active = 0
        self._next: _Timer | None = None
        self._busy = 0.0  # time integral of the number of users

    @property
    def active(self) -> int:
        """Users right now."""
        return self._active

    def average(self) -> float:
        """Users on average so far."""
        self._advance()
        return self._busy / self._clock.now if self._clock.now > 0 else 0.0

    def use(self, nbytes: float, done: Callable[[], None]) -> _Timer:
        self._advance()
        timer = _Timer(done)
        self._count += 1
        heapq.heappush(self._jobs, (self._virtual + nbytes, self._count, timer))
        self._active += 1
        self._plan()
        return timer

    def give_up(self, timer: _Timer) -> None:
        if timer.call is not None:
            self._advance()
            timer.call = None
            self._active -= 1
            self._plan()

    def _advance(self) -> None:
        passed = self._clock.now - self._seen
        self._seen = self._clock.now
        if self._active:
            self._virtual += passed * self._rate / self._active
            self._busy += passed * self._active

    def _plan(self) -> None:
        if self._next is not None:
            self._next.call = None
            self._next = None
        while self._jobs and self._jobs[0][2].call is None:
            heapq.heappop(self._jobs)
        if self._jobs:
            left = max(0.0, self._jobs[0][0] - self._virtual) * self._active / self._rate
            self._next = self._clock.at(self._clock.now + left, self._finish)

    def _finish(self) -> None:
        self._advance()
        _, _, timer = heapq.heappop(self._jobs)
        done, timer.call = timer.call, None
        self._next = None
        self._active -= 1
        self._plan()
        if done is not None:
            done()


class Process:
    """Runs a generator; `done` happens when it returns, with "ok", or when it is stopped, with "stopped"."""

    def __init__(self, clock: Clock, disk: Disk, body: Body) -> None:
        self.done = Event()
        self._clock, self._disk, self._body = clock, disk, body
        self._timer: _Timer | None = None
        self._on_disk = False
        self._turn = 0
        self._go(None)

    def stop(self) -> None:
        if self.done.happened:
            return
        self._turn += 1
        if self._timer is not None:
            if self._on_disk:
                self._disk.give_up(self._timer)
            self._timer.call = None
        self._body.close()
        self.done.set("stopped")

    def _go(self, value: Any) -> None:
        self._timer, self._on_disk = None, False
        self._turn += 1
        try:
            wanted = self._body.send(value)
        except StopIteration:
            self.done.set("ok")
            return
        turn = self._turn
        if isinstance(wanted, Write):
            self._on_disk = True
            self._timer = self._disk.use(wanted.nbytes, lambda: self._go(None))
        elif isinstance(wanted, Event):
            if wanted.happened:
                self._timer = self._clock.at(self._clock.now, lambda: self._go(wanted.value))
            else:
                wanted.waiting.append(lambda value: self._go(value) if self._turn == turn else None)
        else:
            self._timer = self._clock.at(self._clock.now + wanted, lambda: self._go(None))
