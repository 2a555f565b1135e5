"""Who serves, and what happens when it stops: the engine's state machine. Pure logic with an injected clock.

The engine tells it what happened (`Died`, `Hung`, `Fenced`, …), it answers with what to do next (`Fence`,
`CheckOwner`, `Activate`, …). It performs nothing itself, so every order of events can be tried in a test.

    STARTING ──► ACTIVATING ──► REBUILDING ──► SERVING
                   ▲  │ fails        │ fault       │ fault
                   │  ▼              ▼             ▼
    COLD_START ──► │ FENCING ◄───────┴─────────────┘
        ▲          │   │ killed and reaped
        │          │   ▼
        └─ none ── └─ CHECKING owner, epoch, device ──► one is unfit: REPLACING_OWNER ──► COLD_START
                       attempts spent: UNAVAILABLE

Transitions that do not exist, and why:

- SERVING or REBUILDING straight to ACTIVATING: a second writer of the arena would be let in before the first is known
  to be dead. Only `Fenced`, which the engine reports once nothing the process does counts any more, leads on.
- CHECKING to SERVING: answering a probe makes nobody eligible. Only a finished activation does.
- REPLACING_OWNER to ACTIVATING: whoever stood by has mapped memory that was given up.
- UNAVAILABLE to anything but CLOSED: a caller that was told so has already given up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from belayer.engine.supervisor.messages import (
    Action,
    Activate,
    Activated,
    Cause,
    CheckDevice,
    CheckOwner,
    Close,
    DeviceChecked,
    Died,
    Event,
    Fence,
    Fenced,
    GiveUp,
    Hung,
    OwnerChecked,
    OwnerLost,
    OwnerReplaced,
    Ready,
    Rebuilt,
    Refused,
    ReplaceOwner,
    Route,
    Spawn,
    Started,
    Tick,
    WeightsDamaged,
)


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
    arm_s: float = 0.15
    """How long a rebuild has the machine to itself before the next shadow is started beside it. A short one is over by
    then and is not slowed down; a long one must not be without a shadow for so long."""


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
    _owner_gone: bool = False  # since it was asked
    _damaged: bool = False  # the weights must come from their source again
    _failures: int = 0
    _standby_failures: int = 0
    _first_reason: str = ""
    _deadline: float | None = None
    _arm_at: float | None = None  # while rebuilding, until it is time to arm
    _fencing: set[int] = field(default_factory=set)

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due at the latest."""
        starting = self._standby.start_by if self._standby and not self._standby.ready else None
        arming = self._arm_at if self.state is State.REBUILDING else None
        return min((d for d in (self._deadline, starting, arming) if d is not None), default=None)

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
            case DeviceChecked(reason):
                return self._on_device(reason)
            case WeightsDamaged(reason):
                return self._on_damaged(reason)
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
        return [Spawn(fill=fill)]

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
        if self._damaged:
            return self._stop_for_owner(Cause.DAMAGED)
        self.state = State.CHECKING
        self._owner_gone = False
        return [CheckOwner()]

    # -- owner, weights, device ---------------------------------------------------------------------------------------
    def _on_owner(self, reason: str | None) -> list[Action]:
        if self.state is not State.CHECKING:
            return []
        if self._damaged:
            return self._stop_for_owner(Cause.DAMAGED)
        if reason is not None:
            self._first_reason = self._first_reason or reason
            return self._stop_for_owner(Cause.LOST)
        return [CheckDevice()]

    def _on_device(self, reason: str | None) -> list[Action]:
        if self.state is not State.CHECKING:
            return []
        if self._damaged:
            return self._stop_for_owner(Cause.DAMAGED)
        if reason is not None:
            self._first_reason = self._first_reason or reason
            self._failures += 1
            return self._give_up() if self._failures >= self.limits.attempts else self._stop_for_owner(Cause.DEVICE)
        if self._owner_gone:
            self._first_reason = self._first_reason or "the owner ended"
            return self._stop_for_owner(Cause.LOST)
        if self._standby and self._standby.ready:
            self._candidate, self._standby = self._standby.generation, None
            self.how = "promotion"
            return self._activate(self._candidate)
        return self._cold_start()

    def _on_damaged(self, reason: str) -> list[Action]:
        """Nobody who looks at this epoch may go on, whatever it is doing."""
        if self._damaged or self.state is State.REPLACING_OWNER:
            return []
        self._damaged = True
        self._failures = 0 if self.state is State.SERVING else self._failures + 1
        self._first_reason = self._first_reason or reason
        standby = self._standby.generation if self._standby else None
        victims = [g for g in (self.serving, self._candidate, standby) if g is not None and g not in self._fencing]
        self.serving = self._candidate = self._standby = None
        if self.state is State.CHECKING:  # its answer is on the way
            return [self._fence(generation) for generation in victims]
        self._deadline = None
        self.state = State.FENCING
        return [self._fence(generation) for generation in victims] or self._after_fence()

    def _on_owner_lost(self) -> list[Action]:
        if self.state in (State.SERVING, State.REBUILDING):
            return self._replace_owner()
        # everywhere else the next activation fails and leads to CHECKING, which finds out
        self._owner_gone = self.state is State.CHECKING
        return []

    def _stop_for_owner(self, cause: Cause) -> list[Action]:
        self.state = State.REPLACING_OWNER
        return self._replace_owner(cause)

    def _replace_owner(self, cause: Cause = Cause.LOST) -> list[Action]:
        if self._replacing:
            return []
        self._replacing = True
        actions: list[Action] = []
        if self._standby:  # it looks at memory of an owner that is gone
            actions.append(self._fence(self._standby.generation))
            self._standby = None
        return [*actions, ReplaceOwner(cause)]

    def _on_owner_replaced(self, reason: str | None) -> list[Action]:
        self._replacing = False
        self._damaged = self._damaged and reason is not None
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
        self._arm_at = self.clock() + self.limits.arm_s
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
        long_rebuild = self.state is State.REBUILDING and self._arm_at is None
        served = self.state is State.SERVING or long_rebuild
        if not wanted or not served or self._standby_failures >= self.limits.attempts:
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
        if self.state is State.REBUILDING and self._arm_at is not None and now >= self._arm_at:
            self._arm_at = None
            actions += self._arm()
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
