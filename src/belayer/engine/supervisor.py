"""Who serves, and what happens when it stops: the engine's state machine. Pure logic with an injected clock.

The engine tells it what happened (`Died`, `Hung`, `Fenced`, …), it answers with what to do next (`Fence`,
`CheckOwner`, `Activate`, …). It performs nothing itself, so every order of events can be tried in a test.

    STARTING ──► ACTIVATING ──► REBUILDING ──► SERVING
                   ▲  │ fails        │ fault       │ fault
                   │  ▼              ▼             ▼
    COLD_START ──► │ FENCING ◄───────┴─────────────┘
        ▲          │   │ killed and reaped
        │          │   ▼
        └─ none ── └─ CHECKING (owner, epoch) ──► owner lost: REPLACING_OWNER ──► COLD_START
                       attempts spent: UNAVAILABLE

Transitions that do not exist, and why:

- SERVING or REBUILDING straight to ACTIVATING: a second writer of the arena would be let in before the first is known
  to be dead. Only `Fenced`, which the engine reports after reaping the process, leads on.
- CHECKING to SERVING: answering a probe makes nobody eligible. Only a finished activation does.
- UNAVAILABLE to anything but CLOSED: a caller that was told so has already given up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field


class State(enum.StrEnum):
    STARTING = "starting"
    ACTIVATING = "activating"
    REBUILDING = "rebuilding"
    SERVING = "serving"
    FENCING = "fencing"
    CHECKING = "checking"
    REPLACING_OWNER = "replacing owner"
    COLD_START = "cold start"
    UNAVAILABLE = "unavailable"
    CLOSED = "closed"


# -- what the engine reports ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Started:
    """A process of this generation was started."""

    generation: int


@dataclass(frozen=True)
class Ready:
    """It is warmed up."""

    generation: int


@dataclass(frozen=True)
class Died:
    generation: int
    fault: str


@dataclass(frozen=True)
class Hung:
    generation: int
    fault: str


@dataclass(frozen=True)
class Fenced:
    """It was killed and reaped: it cannot write anywhere any more."""

    generation: int


@dataclass(frozen=True)
class OwnerChecked:
    """The owner answered and its epoch may serve (`reason` None), or not."""

    reason: str | None


@dataclass(frozen=True)
class OwnerLost:
    """The owner died. A serving worker keeps its mappings and goes on."""


@dataclass(frozen=True)
class OwnerReplaced:
    """A new owner holds the weights that were in force (`reason` None), or could not be made."""

    reason: str | None


@dataclass(frozen=True)
class Activated:
    generation: int


@dataclass(frozen=True)
class Refused:
    """It will not become the serving worker."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Rebuilt:
    """Every request that was in flight has its next token, or there was none."""

    generation: int


@dataclass(frozen=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True)
class Close:
    pass


Event = (
    Started
    | Ready
    | Died
    | Hung
    | Fenced
    | OwnerChecked
    | OwnerLost
    | OwnerReplaced
    | Activated
    | Refused
    | Rebuilt
    | Tick
    | Close
)


# -- what the engine shall do -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fence:
    generation: int


@dataclass(frozen=True)
class CheckOwner:
    pass


@dataclass(frozen=True)
class ReplaceOwner:
    pass


@dataclass(frozen=True)
class Activate:
    generation: int


@dataclass(frozen=True)
class Route:
    """Give it the requests in flight, then the new ones."""

    generation: int


@dataclass(frozen=True)
class Spawn:
    """Start a process. `fill`: it loads the checkpoint; `background`: a worker is serving meanwhile."""

    fill: bool
    background: bool


@dataclass(frozen=True)
class GiveUp:
    reason: str


Action = Fence | CheckOwner | ReplaceOwner | Activate | Route | Spawn | GiveUp


@dataclass
class _Process:
    generation: int
    start_by: float
    ready: bool = False


@dataclass
class Limits:
    """Deadlines in seconds, and how many processes may fail in one recovery before it is given up."""

    start_s: float = 180.0
    promote_s: float = 10.0
    attempts: int = 3
    standby: bool = True


@dataclass
class Supervisor:
    """Feed it events with `handle`; do what it returns. `serving` is the generation that may be talked to."""

    limits: Limits
    clock: Callable[[], float]
    state: State = State.STARTING
    serving: int | None = None
    how: str = "start"
    _candidate: int | None = None
    _standby: _Process | None = None
    _spawning: int = 0  # Spawn actions whose Started has not come yet
    _filled: bool = False  # the owner holds weights that have served
    _replacing: bool = False
    _failures: int = 0
    _standby_failures: int = 0
    _first_reason: str = ""
    _deadline: float | None = None
    _fencing: set[int] = field(default_factory=set)

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due at the latest."""
        starting = self._standby.start_by if self._standby and not self._standby.ready else None
        return min((d for d in (self._deadline, starting) if d is not None), default=None)

    @property
    def standby(self) -> int | None:
        """The generation that could take over at once, if there is one."""
        return self._standby.generation if self._standby and self._standby.ready else None

    @property
    def protected(self) -> bool:
        return self.state is State.SERVING and self.standby is not None

    def begin(self) -> list[Action]:
        """The first actions: the worker that loads the model, and its shadow beside it."""
        self._set_deadline(self.limits.start_s)
        return self._spawn(fill=True) + (self._spawn(fill=False) if self.limits.standby else [])

    def handle(self, event: Event) -> list[Action]:
        if self.state is State.CLOSED or (self.state is State.UNAVAILABLE and not isinstance(event, Close)):
            return []
        match event:
            case Started(generation):
                return self._on_started(generation)
            case Ready(generation):
                return self._on_ready(generation)
            case Died(generation, fault) | Hung(generation, fault):
                return self._on_fault(generation, fault)
            case Refused(generation, reason):
                return self._on_fault(generation, reason)
            case Fenced(generation):
                self._fencing.discard(generation)
                return self._after_fence()
            case OwnerChecked(reason):
                return self._on_owner(reason)
            case OwnerLost():
                return self._on_owner_lost()
            case OwnerReplaced(reason):
                return self._on_owner_replaced(reason)
            case Activated(generation):
                return self._on_activated(generation)
            case Rebuilt(generation):
                return self._on_rebuilt(generation)
            case Tick():
                return self._on_tick()
            case Close():
                self.state = State.CLOSED
                self._deadline = None
                return []

    # -- starting -----------------------------------------------------------------------------------------------------
    def _spawn(self, *, fill: bool) -> list[Action]:
        self._spawning += 1
        return [Spawn(fill=fill, background=self.state in (State.SERVING, State.REBUILDING))]

    def _on_started(self, generation: int) -> list[Action]:
        self._spawning -= 1
        if self._candidate is None and self.state in (State.STARTING, State.COLD_START):
            self._candidate = generation
        elif self._standby is None:
            self._standby = _Process(generation, self.clock() + self.limits.start_s)
        else:
            return [self._fence(generation)]  # nobody needs it any more
        return []

    def _on_ready(self, generation: int) -> list[Action]:
        if generation == self._candidate and self.state in (State.STARTING, State.COLD_START):
            return self._activate(generation)
        if self._standby and generation == self._standby.generation:
            self._standby.ready = True
            self._standby_failures = 0
        return []

    # -- faults -------------------------------------------------------------------------------------------------------
    def _on_fault(self, generation: int, fault: str) -> list[Action]:
        if self._standby and generation == self._standby.generation:
            self._standby = None
            self._standby_failures += 1
            return [self._fence(generation), *self._arm()]
        if generation not in (self.serving, self._candidate) or generation in self._fencing:
            return []
        if generation == self.serving:
            self.serving = None
            self._failures = 0 if self.state is State.SERVING else self._failures + 1
        else:
            self._candidate = None
            # before anything has served the cause is the model or the configuration: trying again only takes longer
            self._failures = self._failures + 1 if self._filled else self.limits.attempts
        self._first_reason = fault if self._failures == 0 else self._first_reason or fault
        self._deadline = None
        self.state = State.FENCING
        return [self._fence(generation)]

    def _fence(self, generation: int) -> Action:
        self._fencing.add(generation)
        return Fence(generation)

    def _after_fence(self) -> list[Action]:
        if self.state is not State.FENCING or self._fencing:
            return []
        if self._failures >= self.limits.attempts:
            return self._give_up()
        self.state = State.CHECKING
        return [CheckOwner()]

    def _on_owner(self, reason: str | None) -> list[Action]:
        if self.state is not State.CHECKING:
            return []
        if reason is not None:
            self._first_reason = self._first_reason or reason
            self.state = State.REPLACING_OWNER
            return self._replace_owner()
        if self._standby and self._standby.ready:
            self._candidate, self._standby = self._standby.generation, None
            self.how = "promotion"
            return self._activate(self._candidate)
        return self._cold_start()

    def _on_owner_lost(self) -> list[Action]:
        # everywhere else the next activation fails and leads to CHECKING, which finds out
        return self._replace_owner() if self.state in (State.SERVING, State.REBUILDING) else []

    def _replace_owner(self) -> list[Action]:
        if self._replacing:
            return []
        self._replacing = True
        actions: list[Action] = []
        if self._standby:  # it looks at memory of an owner that is gone
            actions.append(self._fence(self._standby.generation))
            self._standby = None
        return [*actions, ReplaceOwner()]

    def _on_owner_replaced(self, reason: str | None) -> list[Action]:
        self._replacing = False
        if self.state is State.REPLACING_OWNER:
            if reason is not None:
                return self._give_up()
            return self._cold_start()
        if reason is not None:
            self._standby_failures = self.limits.attempts  # serve on, unprotected
            return []
        return self._arm()

    def _cold_start(self) -> list[Action]:
        self.state = State.COLD_START
        self.how = "cold start"
        self._set_deadline(self.limits.start_s)
        if self._standby:  # half-way up already: quicker than a new one
            self._candidate, self._standby = self._standby.generation, None
            return []
        if self._spawning:
            return []
        return self._spawn(fill=False)

    # -- taking over --------------------------------------------------------------------------------------------------
    def _activate(self, generation: int) -> list[Action]:
        self.state = State.ACTIVATING
        self._set_deadline(self.limits.promote_s)
        return [Activate(generation)]

    def _on_activated(self, generation: int) -> list[Action]:
        if self.state is not State.ACTIVATING or generation != self._candidate:
            return []
        self._candidate = None
        self.serving = generation
        self._filled = True
        self.state = State.REBUILDING
        self._deadline = None  # from here on the hang detector watches it
        return [Route(generation)]

    def _on_rebuilt(self, generation: int) -> list[Action]:
        if self.state is not State.REBUILDING or generation != self.serving:
            return []
        self.state = State.SERVING
        self._failures = 0
        self._first_reason = ""
        return self._arm()

    def _arm(self) -> list[Action]:
        """Start a shadow where one is wanted and none is there; not for ever, if it keeps failing."""
        wanted = self.limits.standby and self._standby is None and not self._spawning and not self._replacing
        if not wanted or self.state is not State.SERVING or self._standby_failures >= self.limits.attempts:
            return []
        return self._spawn(fill=False)

    # -- time ---------------------------------------------------------------------------------------------------------
    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self.clock() + seconds

    def _on_tick(self) -> list[Action]:
        now = self.clock()
        actions: list[Action] = []
        if self._standby and not self._standby.ready and now >= self._standby.start_by:
            generation = self._standby.generation
            actions += self._on_fault(generation, f"standby {generation} not ready within {self.limits.start_s:g} s")
        if self._deadline is None or now < self._deadline:
            return actions
        starting = self.state in (State.STARTING, State.COLD_START)
        missed = f"not ready within {self.limits.start_s:g} s" if starting else "did not take over in time"
        if self._candidate is not None:
            return actions + self._on_fault(self._candidate, f"worker {self._candidate} {missed}")
        # the process itself could not be started
        self._deadline = None
        self._first_reason = self._first_reason or f"no worker {missed}"
        return actions + self._give_up()

    def _give_up(self) -> list[Action]:
        self.state = State.UNAVAILABLE
        self._deadline = None
        return [GiveUp(self._first_reason)]
