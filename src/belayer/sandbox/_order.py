"""What whoever wants a checkpoint says about it."""

from __future__ import annotations

from dataclasses import dataclass

from belayer.checkpoint.manifest import Level
from belayer.checkpoint.turns import Turn


@dataclass(frozen=True, kw_only=True)
class Order:
    """Most of it goes into the manifest as it is.

    `attempt` None: the sandbox's own. `level`: exactly this one, or None for the highest that is possible. `turn`: its
    place in the host's order of dumps, for a caller that wants to promote or abandon it meanwhile.
    """

    action: int
    context_hash: str = ""
    rollout: str = ""
    attempt: int | None = None
    level: Level | None = None
    turn: Turn | None = None
