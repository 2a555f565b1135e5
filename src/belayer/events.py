"""What happened, as seen by people: small immutable events that every part emits through one hook.

Events feed the live view, `metrics.jsonl`, the timeline and the report. They are never read back to make a decision:
the journal is the only truth, and losing an event loses nothing but a line in a picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened.

    `at` is wall-clock seconds since the epoch, `kind` one of the names below, `subject` what it happened to (a rollout
    id, "worker", a sandbox id), `data` plain JSON-able details. Durations are in seconds and end in `_s`.
    """

    kind: str
    subject: str = ""
    at: float = msgspec.field(default_factory=time.time)
    data: dict[str, Any] = msgspec.field(default_factory=dict)


EventSink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The sink for callers that do not watch."""


def fan_out(*sinks: EventSink) -> EventSink:
    """One sink that passes each event to all of `sinks`, in their order."""

    def emit(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return emit


# -- run and training ----------------------------------------------------------------------------
RUN_PHASE = "run.phase"  # subject: what of the run is started now ("sandboxes", "engine"), or "open": all of it is
RUN_STARTED = "run.started"  # seed, resumed, steps (planned, of the whole run), inject (bool), versions {name: version}
RUN_FINISHED = "run.finished"  # wall_s, ok
LOG_CONTINUED = "log.continued"  # first line that a resumed driver (or a later comparison) adds to metrics.jsonl
RUN_COMPARED = "run.compared"  # reference, rollouts_compared, rollouts_identical, tokens_compared, tokens_changed
# step counts from 0; the event is emitted at the step's end
TRAIN_STEP = "train.step"  # step, reward_mean, reward_std, loss, rollouts, rollout_s, optimise_s, weights_s, wall_s
ROLLOUT_STARTED = "rollout.started"  # group, attempt, step
ROLLOUT_FINISHED = "rollout.finished"  # reward, turns, tokens, wall_s, attempt
ROLLOUT_DELIVERED = "rollout.delivered"  # attempt, step; emitted once the trainer's acknowledgement is journalled
ROLLOUT_FAILED = "rollout.failed"  # reason, failure (error type)
ROLLOUT_TRUNCATED = "rollout.truncated"  # position, action, reason

# -- what a rollout does, for the timeline --------------------------------------------------------
GENERATE = "span.generate"  # turn, tokens, start (wall clock), wall_s
EXEC = "span.exec"  # action, exit_code, start, wall_s
# action, id, level, start, wall_s, frozen_s, exposed_s (time the rollout waited for it), bytes (process images)
CHECKPOINT = "span.checkpoint"
# none was taken, or (abandoned: true) one was given up: action, abandoned, why
CHECKPOINT_SKIPPED = "checkpoint.skipped"
# emitted when a checkpoint's background write has ended: it survives a reboot from here on
CHECKPOINT_DURABLE = "checkpoint.durable"  # id, bytes, wall_s

CHECKPOINT_RETRIED = "checkpoint.retried"  # reason: it was refused for something that passes, and is tried once more
# a checkpoint was taken, or a restore was made from one, that holds no processes; subject: the sandbox
CHECKPOINT_LEVEL = "checkpoint.level"  # id, level, reason (why not full), lost (what a restore will not bring back)
RESTORE_LEVEL = "restore.level"  # id, level, reason, lost (what was not brought back)

SANDBOXES_RUNNING = "sandbox.running"  # count; emitted whenever a sandbox of the run begins or ends

# retention took results out of the journal: segments, results, bytes_before, bytes_after, error
JOURNAL_COMPACTED = "journal.compacted"

# -- faults and recoveries ------------------------------------------------------------------------
# subject of a worker's fault or recovery: "worker"; of a sandbox's: the rollout it serves
# emitted before the blow falls, so that it precedes the detection
FAULT_INJECTED = "fault.injected"  # fault (worker.sigkill, worker.sigstop, sandbox.kill, sandbox.damage), target
FAULT_DETECTED = "fault.detected"  # fault ("checkpoint": one was refused or did not restore), how, detect_s where known
# what ("worker" | "sandbox"), how (promotion, cold start, image, restore, …), fault where known,
# phases {name: s}, total_s
RECOVERED = "recovered"

# -- engine ---------------------------------------------------------------------------------------
WORKER_STATE = "engine.worker"  # generation, pid, state (starting, serving, dead)
SHADOW_STATE = "engine.shadow"  # pid, state (starting, ready, promoted, dead, none), reason
WEIGHTS_COMMITTED = "engine.weights"  # epoch, policy_version, digest, wall_s
OWNER_STATE = "engine.owner"  # pid, state
KV_ADOPTED = "engine.adopted"  # generation, blocks, tokens, refused
# state (restored, doubted, refused, none, building, built, cut off), key, reason
# restored: restore_s, ready_s, pid; built: nbytes, phases; cut off: the engine ended while it was being built
ENGINE_IMAGE = "engine.image"
STALE_DROPPED = "engine.stale_dropped"  # generation, count
