"""Sets aside what keeps failing, a task or an image, so that it does not burn the budget of every rollout in turn."""

from __future__ import annotations

from belayer.errors import RESUME, Quarantined


class Quarantine:
    """Counts rollouts that failed for good, by what they had in common, since the last one of its kind that finished.

    It lives as long as the driver: who starts the run again has looked at the cause, and everything gets a new chance.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failed: dict[str, list[str]] = {}

    def failed(self, reason: str, *suspects: str) -> None:
        """A rollout failed for good; each of `suspects` may have been the cause."""
        for suspect in suspects:
            self._failed.setdefault(suspect, []).append(reason)

    def succeeded(self, *suspects: str) -> None:
        """A rollout finished: none of `suspects` is one."""
        for suspect in suspects:
            self._failed.pop(suspect, None)

    def check(self, *suspects: str) -> None:
        """Raises `Quarantined`, with the first reason, if one of `suspects` has failed too often."""
        for suspect in suspects:
            reasons = self._failed.get(suspect, [])
            if len(reasons) >= self._limit:
                raise Quarantined(
                    f"{suspect} is set aside: {len(reasons)} rollouts with it failed for good and none finished "
                    f"(recovery.quarantine = {self._limit})",
                    first=reasons[0],
                    kept="the journal",
                    next_step=f"repair the cause, then {RESUME}",
                )
