"""The states of a rollout's environment, its name, and what unwinds the user's function.

    ABSENT      no sandbox yet; the first action creates one
    READY       a sandbox with the first `completed` actions applied, verified healthy when it was last used
    LOST        it died, hangs or was damaged; nothing may use it
    RECOVERING  a restore and replay is under way (at most one, started by whoever notices first)
    CLOSED      nothing more will happen

Forbidden: LOST → READY without a restore (a damaged sandbox may answer, and answer wrongly), and any action while a
checkpoint of the state before it is pending (the checkpoint would describe neither the state before nor after).
"""

from __future__ import annotations

import enum


class EnvironmentState(enum.Enum):
    ABSENT = "absent"
    READY = "ready"
    LOST = "lost"
    RECOVERING = "recovering"
    CLOSED = "closed"


class RestartFunction(BaseException):
    """Unwinds the user's function: its context was truncated, it must be run again from the journal.

    A BaseException, so that an `except Exception` in user code does not take it for an error of its own.
    """


def environment_name(rollout: str, attempt: int) -> str:
    """What the sandbox of an attempt is called."""
    return f"{rollout}.{attempt}".replace("/", "-")
