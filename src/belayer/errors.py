"""The whole error model of Belayer, one type per boundary.

Every error says three things: what happened, what was kept, and what to do next. `str(error)` prints all three.

    BelayerError
    ├── ConfigError             the user's configuration cannot be used            (nothing was started)
    ├── RunError                a run directory cannot be opened
    │   ├── RunInUse            another live process holds it
    │   ├── RunVersionMismatch  it was written by an incompatible version of Belayer
    │   ├── CircuitOpen         environments keep failing and nothing gets done        (the run stops, resumable)
    │   └── NoProgress          nothing was journalled for long although there is work (the run stops, resumable)
    ├── StorageFull             a disk, store or memory-backed file system is full  (the last durable state is kept)
    ├── JournalError
    │   ├── JournalCorrupt      a damaged record that is not a torn tail            (never skipped)
    │   └── ReplayDivergence    a re-run rollout function asked for something else than the journal holds
    ├── EngineError             the rollout engine
    │   ├── EngineUnavailable   no worker can serve and none could be started
    │   ├── RequestRefused      the request cannot be honoured exactly, and is refused at submission
    │   ├── TurnRestarted       new weights arrived in the middle of a turn, and the run lets no turn span two versions
    │   ├── ForbiddenTransition a defect of ours: a step was taken that its state machine does not have
    │   ├── WeightsError        an epoch is dirty, its layout or digest does not match, or an update failed
    │   └── OwnerLost           the process that holds weights and KV arena is gone
    ├── SandboxError            the environment; always an infrastructure failure, never the agent's doing
    │   ├── SandboxUnavailable  a sandbox could not be created on this host
    │   ├── SandboxLost         it died, hangs or was damaged from outside           (restore it)
    │   ├── StaleSandbox        a handle of an earlier generation was used           (get the new handle)
    │   ├── CheckpointRefused   the state cannot be captured at the level asked for
    │   ├── CheckpointAbandoned it was given up before anything of it was done
    │   ├── CheckpointDamaged   images or manifest do not verify                    (an older one is used)
    │   │   └── CheckpointUnfit made on a host whose process images this one cannot take over
    │   ├── RestoreFailed       a restore did not produce the checkpointed state    (nothing was activated)
    │   └── ImageError          a sandbox image is missing or cannot be unpacked
    └── RolloutFailed           one rollout ended without a trajectory; carries the *first* failure
        ├── BudgetSpent         its infrastructure or agent retry budget is used up
        ├── Quarantined         its task or image has failed too often already: it was not even tried
        ├── GroupFailed         a group cannot be completed, and is not handed over short
        └── ContextDiverged     the environment cannot be what a harness's context says, and we cannot cut that context

What an agent's command does (a non-zero exit, a timeout, an out-of-memory kill in its own cgroup) is a result, not an
error: see `belayer.sandbox.ExecResult`. An infrastructure failure is never turned into a reward and never dropped.
"""

from __future__ import annotations

RESUME = "`belayer resume` the run, or start your program again"
"""What to do once the cause of a stop is repaired; fits runs of `belayer train` and of programs."""


class BelayerError(Exception):
    """Base of every error that Belayer raises on purpose.

    `kept` says what survived the failure, `next_step` what the reader can do about it.
    """

    def __init__(self, what: str, *, kept: str | None = None, next_step: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.kept = kept
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.kept:
            lines.append(f"  kept: {self.kept}")
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)


class ConfigError(BelayerError):
    """The configuration cannot be used; nothing was started."""


class RunError(BelayerError):
    """A run directory cannot be opened."""


class RunInUse(RunError):
    """Another live process holds the run directory."""


class RunVersionMismatch(RunError):
    """The run directory was written in a format that this version does not read."""


class CircuitOpen(RunError):
    """Environments failed many times in a row without one completed action; going on would only burn budget."""


class NoProgress(RunError):
    """Nothing was journalled for a long time although rollouts are under way; the text says where each one stands."""


class StorageFull(BelayerError):
    """A disk, a sandbox store or memory-backed storage has no room left."""


class JournalError(BelayerError):
    """The journal cannot be read or written."""


class JournalCorrupt(JournalError):
    """A record in the middle of the journal is damaged. It is never skipped."""


class ReplayDivergence(JournalError):
    """A rollout function, run again, made another call than the one in its journal.

    The text shows the calls before it and what is other; `journalled` and `requested` hold both sides whole.
    """

    def __init__(self, what: str, *, journalled: str, requested: str, kept: str | None = None) -> None:
        super().__init__(
            what,
            kept=kept,
            next_step="make the function deterministic: take randomness from rollout.random and time from rollout.now",
        )
        self.journalled = journalled
        self.requested = requested


class EngineError(BelayerError):
    """The rollout engine failed."""


class EngineUnavailable(EngineError):
    """No worker serves and none could be started."""


class RequestRefused(EngineError):
    """The request cannot be served exactly as asked, so it was refused before any token was generated."""


class WeightsError(EngineError):
    """A weights epoch is dirty, does not match its layout or digest, or could not be updated."""


class TurnRestarted(EngineError):
    """New weights arrived before the turn was complete; its tokens are void and it is to be generated again."""


class ForbiddenTransition(EngineError):
    """A step that a state machine does not have: a defect of Belayer, stopped before it could do harm."""


class OwnerLost(EngineError):
    """The owner process, which holds the weights and the KV arena, is gone."""


class SandboxError(BelayerError):
    """An environment failed for a reason outside the agent's control."""


class SandboxUnavailable(SandboxError):
    """A sandbox cannot be created on this host."""


class SandboxLost(SandboxError):
    """A sandbox died, hangs or was damaged from outside; restore it from its newest checkpoint.

    `ambiguous`: what ran inside may have brought it about. Then it is tried once more, and not again.
    """

    def __init__(
        self, what: str, *, kept: str | None = None, next_step: str | None = None, ambiguous: bool = False
    ) -> None:
        super().__init__(what, kept=kept, next_step=next_step)
        self.ambiguous = ambiguous


class StaleSandbox(SandboxError):
    """A handle of an earlier generation was used after a restore."""


class CheckpointRefused(SandboxError):
    """The sandbox's state cannot be captured at the level asked for."""


class CheckpointRefusedForNow(CheckpointRefused):
    """As above, for something that passes by itself, like data that nobody has read yet. It was tried twice."""


class CheckpointAbandoned(SandboxError):
    """A checkpoint was given up before it had begun; the sandbox was not touched."""


class CheckpointDamaged(SandboxError):
    """A checkpoint's images or manifest do not verify."""


class CheckpointUnfit(CheckpointDamaged):
    """A checkpoint is whole, but this host cannot take over the process images of the one that made it."""


class RestoreFailed(SandboxError):
    """A restore did not produce the checkpointed state; nothing of it was activated."""


class ImageError(SandboxError):
    """A sandbox image is missing or cannot be unpacked."""


class RolloutFailed(BelayerError):
    """A rollout ended without a trajectory. `first` is the failure that started it."""

    def __init__(self, what: str, *, first: str, kept: str | None = None, next_step: str | None = None) -> None:
        # one that is raised because of another quotes it, and so has its first failure already
        super().__init__(what if first in what else f"{what} (first failure: {first})", kept=kept, next_step=next_step)
        self.first = first


class BudgetSpent(RolloutFailed):
    """The rollout's budget of infrastructure or agent retries is used up."""


class ContextDiverged(RolloutFailed):
    """After a fault the environment could not be brought back to what the harness's context says of it.

    Belayer cuts the contexts that it keeps itself. A harness keeps its own, so the rollout has to end: going on would
    let the model act on a state that it has never seen.
    """


class Quarantined(RolloutFailed):
    """The rollout's task or image made too many rollouts fail for good; this one was not tried."""


class GroupFailed(RolloutFailed):
    """A group has fewer trajectories than were asked for, and may not be completed by further draws."""
