"""What the fault campaigns share: how one begins, goes on after a stop, keeps what it knows, and tells of it.

A campaign works for hours, so all that it has found out is in a state file: the next call with `--resume` begins there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from rich.console import Console

from belayer.errors import ConfigError
from belayer.files import write_atomically

SAY_EVERY_S = 15.0
SHOWN = 20  # of what went wrong


class Saved(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every campaign keeps. `found` counts by kind of failure, `details` has a sentence about each."""

    seed: int
    found: dict[str, int] = {}
    details: list[str] = []
    wall_s: float = 0.0  # of all its calls together

    def count(self, what: str, *details: str) -> None:
        """One more of `what` for each of the sentences."""
        if details:
            self.found[what] = self.found.get(what, 0) + len(details)
            self.details += [f"{what}: {detail}" for detail in details]

    def add(self, found: Mapping[str, int], details: Iterable[str]) -> None:
        """What somebody else has counted."""
        for what, number in found.items():
            self.found[what] = self.found.get(what, 0) + number
        self.details += details

    @property
    def wrong(self) -> dict[str, int]:
        return {what: count for what, count in self.found.items() if count}


S = TypeVar("S", bound=Saved)


class Campaign(ABC, Generic[S]):
    """One campaign. `saved` is always current; `save` brings it to the state file, `carry_out` does so at the end."""

    unit = "faults"

    def __init__(self, saved: S, *, state: Path, say: Callable[[str], None]) -> None:
        self.saved: S = saved
        self._state = state.absolute()
        self._say = say
        self._began = time.monotonic()
        self._spoke = time.monotonic()

    @property
    @abstractmethod
    def done(self) -> int:
        """How many of `unit` are behind it."""

    @abstractmethod
    def run(self) -> None:
        """Go on from `saved` to the end."""

    def same_plan(self, earlier: S) -> bool:
        """Whether an earlier campaign was to do the same, so that this one can go on with it."""
        return earlier.seed == self.saved.seed

    def begin(self, *, resume: bool) -> None:
        """Take over what the state file holds of an earlier campaign; without `resume` that file is put aside.

        Raises `ConfigError` for a file that is not of such a campaign; it is left as it is.
        """
        try:
            content = self._state.read_bytes()
        except FileNotFoundError:
            if resume:
                self._say(f"nothing to go on with: there is no {self._state}")
            return
        if not resume:
            aside = self._state.with_suffix(".old")
            self._state.replace(aside)
            self._say(f"an earlier campaign was put aside as {aside}")
            return
        try:
            earlier = msgspec.json.decode(content, type=type(self.saved))
            reason = "" if self.same_plan(earlier) else "it is of a campaign with another plan"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            earlier, reason = self.saved, str(error)
        if reason:
            raise ConfigError(
                f"{self._state} cannot be gone on with: {reason}",
                kept="the file, untouched",
                next_step="use the version and the options it was begun with, or begin anew without --resume",
            )
        self.saved = earlier
        self._began = time.monotonic() - earlier.wall_s
        self._say(f"going on after {self.done} {self.unit}")

    def carry_out(self, *, resume: bool, stopped: Callable[[], None]) -> None:
        """`begin` and `run`. After Ctrl-C everything is saved and `stopped` shows what there is so far."""
        self.begin(resume=resume)
        self.save()  # what cannot be saved is better known before than after hours
        try:
            self.run()
        except KeyboardInterrupt:
            stopped()
            self._say(f"stopped after {self.done} {self.unit}; go on with --resume")
            raise
        finally:
            self.save()

    def save(self) -> None:
        self.saved.wall_s = time.monotonic() - self._began
        self._state.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._state, msgspec.json.encode(self.saved))

    def tell(self, how_far: Callable[..., str], *about: Any) -> None:
        """Now and then, say how far it is (`how_far(*about)`), and what has gone wrong so far; and save."""
        if time.monotonic() - self._spoke >= SAY_EVERY_S:
            self._spoke = time.monotonic()
            self.save()
            self._say(f"{how_far(*about)}; wrong so far: {self.saved.wrong or 'nothing'}")


def state_file(name: str, seed: int, *, quick: bool) -> Path:
    """Where a campaign keeps its state; a quick one does not take the place of a long one."""
    return Path("build") / f"bench-faults-{name}-{seed}{'-quick' if quick else ''}.state.json"


def show_verdict(result: dict[str, Any], console: Console) -> None:
    """The checks, and the first of what went wrong."""
    console.print(f"checks: {result['checks']}")
    for text in result["wrong"][:SHOWN]:
        console.print(f"  {text[:1000]}", markup=False)


def milliseconds(seconds: float | None) -> str:
    """For a cell of a table."""
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"
