"""What the engine tells its supervisor, and what the supervisor tells it to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
class DeviceChecked:
    """The device that owner and workers use is well (`reason` None), or not to be used again."""

    reason: str | None


@dataclass(frozen=True)
class WeightsDamaged:
    """The clean epoch no longer has the digest it was committed with: whoever looks at it says wrong things."""

    reason: str


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
    | DeviceChecked
    | WeightsDamaged
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
class CheckDevice:
    pass


class Cause(enum.StrEnum):
    """Why an owner is given up."""

    LOST = "lost"  # dead or silent; the driver's mapping still holds the weights
    DAMAGED = "damaged"  # so does every mapping: the weights come from their source again
    DEVICE = "device"  # its memory must not be used again


@dataclass(frozen=True)
class ReplaceOwner:
    cause: Cause = Cause.LOST


@dataclass(frozen=True)
class Activate:
    generation: int


@dataclass(frozen=True)
class Route:
    """Give it the requests in flight, then the new ones."""

    generation: int


@dataclass(frozen=True)
class Spawn:
    """Start a process. `fill`: it loads the checkpoint."""

    fill: bool


@dataclass(frozen=True)
class GiveUp:
    reason: str


Action = Fence | CheckOwner | CheckDevice | ReplaceOwner | Activate | Route | Spawn | GiveUp
