"""Named states and the steps between them that exist; everything else is refused with the reason why it must not be.

The supervisor (`belayer.engine.supervisor`) decides what happens to the engine as a whole. These tables say what can
happen to one thing in it: an owner, a worker or shadow (the same program), a request.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from belayer.errors import ForbiddenTransition

S = TypeVar("S", bound=enum.StrEnum)


@dataclass(frozen=True)
class Rules(Generic[S]):
    """Which states may follow which, and for some that may not: why."""

    what: str
    start: S
    steps: Mapping[S, frozenset[S]]
    because: Mapping[tuple[S, S], str] = field(default_factory=dict)

    def explain(self, before: S, after: S) -> str:
        reason = self.because.get((before, after))
        return f"{self.what}: {before} is never followed by {after}" + (f", because {reason}" if reason else "")


class Lifecycle(Generic[S]):
    """Where one thing stands under its `Rules`, and since when. `clock` gives seconds."""

    def __init__(self, rules: Rules[S], clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self.state: S = rules.start
        self.since = clock()

    def to(self, state: S) -> None:
        """Take a step. Raises `ForbiddenTransition` for one that does not exist; nothing has changed then."""
        if state not in self._rules.steps[self.state]:
            raise ForbiddenTransition(self._rules.explain(self.state, state))
        self.state = state
        self.since = self._clock()

    @property
    def ended(self) -> bool:
        return not self._rules.steps[self.state]


# -- worker and shadow ------------------------------------------------------------------------------------------------
class ProcessState(enum.StrEnum):
    STARTING = "starting"  # imports, model, warm-up
    READY = "ready"  # stands by, with the weights mapped and no arena
    ACTIVATING = "activating"  # was told to take over; may write to the arena from here on
    SERVING = "serving"
    FENCED = "fenced"  # killed; nothing it says counts any more
    REAPED = "reaped"


_P = ProcessState
PROCESS = Rules(
    "a worker",
    _P.STARTING,
    {
        _P.STARTING: frozenset({_P.READY, _P.FENCED}),
        _P.READY: frozenset({_P.ACTIVATING, _P.FENCED}),
        _P.ACTIVATING: frozenset({_P.SERVING, _P.FENCED}),
        _P.SERVING: frozenset({_P.FENCED}),
        _P.FENCED: frozenset({_P.REAPED}),
        _P.REAPED: frozenset(),
    },
    {
        (_P.STARTING, _P.SERVING): "only a worker that finished the promotion list may be given requests",
        (_P.READY, _P.SERVING): "answering a probe makes nobody eligible; the arena and the epoch come first",
        (_P.SERVING, _P.READY): "a worker that has written to an arena cannot become a shadow again",
        (_P.FENCED, _P.SERVING): "it was declared dead, and another may have taken its place",
        (_P.FENCED, _P.READY): "it was declared dead, and another may have taken its place",
        (_P.STARTING, _P.REAPED): "it is killed before anybody relies on its death",
        (_P.SERVING, _P.REAPED): "its late words must be refused first: the fence comes before the end",
    },
)


# -- owner ------------------------------------------------------------------------------------------------------------
class OwnerPhase(enum.StrEnum):
    STARTING = "starting"
    EMPTY = "empty"  # answers; no epoch was ever committed
    CLEAN = "clean"  # one clean epoch, which may serve
    UPDATING = "updating"  # a clean epoch that serves, and a dirty one that is being written
    LOST = "lost"  # dead, silent, or its content damaged
    REPLACED = "replaced"


_O = OwnerPhase
OWNER = Rules(
    "an owner",
    _O.STARTING,
    {
        _O.STARTING: frozenset({_O.EMPTY, _O.LOST}),
        _O.EMPTY: frozenset({_O.CLEAN, _O.LOST}),
        _O.CLEAN: frozenset({_O.UPDATING, _O.LOST}),
        _O.UPDATING: frozenset({_O.CLEAN, _O.LOST}),
        _O.LOST: frozenset({_O.REPLACED}),
        _O.REPLACED: frozenset(),
    },
    {
        (_O.EMPTY, _O.UPDATING): "an update is written over the content of a clean epoch",
        (_O.UPDATING, _O.UPDATING): "two writers would share the one free slot",
        (_O.UPDATING, _O.EMPTY): "an abandoned update leaves the clean epoch as it was",
        (_O.LOST, _O.CLEAN): "memory of an owner that was given up is not trusted again; a new owner is filled",
        (_O.CLEAN, _O.REPLACED): "a healthy owner is not replaced: workers would look at two copies",
    },
)


# -- request ----------------------------------------------------------------------------------------------------------
class RequestState(enum.StrEnum):
    QUEUED = "queued"  # no worker has it
    PREFILLING = "prefilling"  # a worker has it and owes its next token
    DECODING = "decoding"  # that worker has made a token of it
    FINISHED = "finished"
    CANCELLED = "cancelled"  # the caller went away
    RESTARTED = "restarted"  # new weights arrived and the run does not let a turn span two versions
    FAILED = "failed"  # no worker can serve any more, or the caller's sink raised


_R = RequestState
_ENDS = frozenset({_R.FINISHED, _R.CANCELLED, _R.RESTARTED, _R.FAILED})
REQUEST = Rules(
    "a request",
    _R.QUEUED,
    {
        _R.QUEUED: frozenset({_R.PREFILLING}) | _ENDS,
        _R.PREFILLING: frozenset({_R.QUEUED, _R.DECODING}) | _ENDS,
        _R.DECODING: frozenset({_R.QUEUED}) | _ENDS,
        **{end: frozenset() for end in _ENDS},
    },
    {
        (_R.QUEUED, _R.DECODING): "a token came for a request that no worker was given",
        (_R.DECODING, _R.PREFILLING): "a second worker would make the same tokens; its first must be fenced before",
        (_R.PREFILLING, _R.PREFILLING): "a second worker would make the same tokens; its first must be fenced before",
        **{(end, _R.DECODING): "its caller has had the last word" for end in _ENDS},
    },
)
