"""Levels of a checkpoint: `full`, `fs+shell` and `fs`. Which one is taken, and what a restore says of it.

A run says the lowest level that it accepts (`sandbox.allow_level`). A checkpoint is taken at the highest level that
this host and the state of the sandbox allow; if that is below what the run accepts, it is refused with the reason. What
was taken and why stands in the manifest, and who restores it is told on the new handle (`Sandbox.restored`).
"""

from __future__ import annotations

import msgspec

from belayer.checkpoint.manifest import Level, Manifest
from belayer.errors import CheckpointRefused, CheckpointUnfit, SandboxUnavailable
from belayer.sandbox import criu

ORDER: tuple[Level, ...] = ("fs", "fs+shell", "full")


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """From what a sandbox was brought back, and what of its former self is missing.

    `level` is that of the checkpoint, `reason` why it was not `full` (empty for `full`), `lost` what was there when it
    was taken and is not there now. Only `full` brings processes back; the other two are file systems that a new
    container was started on. On an overlay store inode numbers change, also at `full`: a program that remembers them
    notices (SQLite will not write to a database that was open, until it opens it again).
    """

    checkpoint: str
    level: Level
    reason: str = ""
    lost: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Did everything come back?"""
        return self.level == "full" and not self.lost


def restored_from(manifest: Manifest) -> Restored:
    """What to tell whoever restores this checkpoint."""
    return Restored(checkpoint=manifest.id, level=manifest.level, reason=manifest.reason, lost=tuple(manifest.lost))


class Levels:
    """What one run accepts and its host can give. `why`: what keeps the host from more than `best`."""

    def __init__(self, allow: Level, best: Level = "full", why: str = "") -> None:
        self.allow: Level = allow
        self.best: Level = best
        self.why = why

    @classmethod
    def here(cls, allow: Level) -> Levels:
        """Of this host. Raises `SandboxUnavailable` when it cannot give the level that the run insists on."""
        try:
            criu.find_criu()
            return cls(allow)
        except SandboxUnavailable as error:
            if allow == "full":
                error.next_step = f'{error.next_step}, or do without processes: sandbox.allow_level = "fs+shell"'
                raise
            return cls(allow, "fs+shell", error.what)

    def start(self, asked: Level | None) -> tuple[Level, str]:
        """(level to try first, why it is not `full`). Raises `CheckpointRefused`."""
        level: Level = asked or self.best
        if ORDER.index(level) > ORDER.index(self.best):
            raise CheckpointRefused(f"a checkpoint of level {level} cannot be taken on this host: {self.why}")
        if ORDER.index(level) < ORDER.index(self.allow):
            raise CheckpointRefused(
                f"a checkpoint of level {level} is not accepted: sandbox.allow_level is {self.allow}",
                next_step=f'set sandbox.allow_level = "{level}"',
            )
        if level == "full":
            return level, ""
        return level, "it was asked for" if asked else self.why

    def check(self, manifest: Manifest) -> None:
        """May and can this run restore it? Raises `CheckpointUnfit`."""
        at = ORDER.index(manifest.level)
        if at < ORDER.index(self.allow):
            raise CheckpointUnfit(
                f"checkpoint {manifest.id} is of level {manifest.level}, and this run accepts {self.allow} or more",
                next_step=f'set sandbox.allow_level = "{manifest.level}"',
            )
        if at > ORDER.index(self.best):
            raise CheckpointUnfit(f"checkpoint {manifest.id} cannot be restored on this host: {self.why}")

    def below(self, level: Level, refusal: CheckpointRefused) -> Level:
        """The next lower level, if the run accepts it; else raises the `refusal`."""
        at = ORDER.index(level)
        if at == 0 or at - 1 < ORDER.index(self.allow):
            if at > 0 and refusal.next_step is None:
                lower = f'accept checkpoints without it: sandbox.allow_level = "{ORDER[at - 1]}"'
                refusal.next_step = f"take care of the reason, or {lower}"
            raise refusal
        return ORDER[at - 1]
