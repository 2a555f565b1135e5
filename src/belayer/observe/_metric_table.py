"""The Prometheus metrics of a run: names, units, labels. docs/observability.md has the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "belayer_"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `name` lacks the prefix; a counter's exposed name ends in `_total`, which is part of `name` here."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help, labels)


def _times(name: str, help: str, *labels: str, buckets: tuple[float, ...] = _SHORT) -> Metric:
    return Metric(name, "histogram", help, labels, buckets)


METRICS = (
    _gauge("run_info", "Always 1; the labels say which run this process drives.", "run", "version"),
    _gauge("run_active", "1 between the run's start and its end, else 0."),
    _counter("train_steps_total", "Optimiser steps done."),
    _gauge("train_steps_planned", "Optimiser steps of the whole run."),
    _gauge("train_reward_mean", "Mean reward of the newest optimiser step."),
    _times("train_step_duration_seconds", "Wall time of an optimiser step with its rollouts.", buckets=_LONG),
    _counter("rollouts_started_total", "Attempts of rollouts that began."),
    _counter("rollouts_finished_total", "Rollouts whose function returned a reward."),
    _counter("rollouts_delivered_total", "Rollouts that the trainer has acknowledged."),
    _counter("rollouts_failed_total", "Attempts that ended without a trajectory, by type of error.", "failure"),
    _counter("rollouts_retried_total", "Attempts that began a rollout anew after a failed one."),
    _counter("rollouts_truncated_total", "Contexts cut short because an action could not be reproduced."),
    _gauge("rollouts_in_flight", "Rollouts that began and have not ended."),
    _times("rollout_duration_seconds", "Wall time of a finished rollout.", buckets=_LONG),
    _counter("tokens_generated_total", "Tokens that the model generated, work done again included."),
    _counter("turns_total", "Turns of the model."),
    _times("turn_duration_seconds", "Wall time of a turn of the model."),
    _counter("actions_total", "Actions in sandboxes, by outcome: ok, failed (exit code not 0), none.", "outcome"),
    _times("action_duration_seconds", "Wall time of an action in a sandbox."),
    _counter("checkpoints_published_total", "Sandbox checkpoints taken, by level.", "level"),
    _counter("checkpoints_skipped_total", "Checkpoints that the policy decided against."),
    _counter("checkpoints_abandoned_total", "Checkpoints that were begun and given up."),
    _counter("checkpoint_hidden_seconds_total", "Checkpoint time during which no rollout waited."),
    _counter("checkpoint_exposed_seconds_total", "Checkpoint time that rollouts waited for."),
    _times("checkpoint_duration_seconds", "Wall time of a checkpoint."),
    _times("checkpoint_frozen_seconds", "Time that a checkpoint kept the sandbox's processes stopped."),
    _counter("checkpoint_bytes_total", "Bytes of process images in checkpoints taken."),
    _counter("checkpoint_durable_bytes_total", "Bytes of checkpoints written to the run's disk and synced."),
    _counter("faults_injected_total", "Faults that fault injection caused, by kind.", "fault"),
    _counter("faults_detected_total", "Faults that were detected, by kind, injected ones included.", "fault"),
    _counter("recoveries_total", "Completed recoveries, by part (worker, sandbox) and way.", "part", "how"),
    _times("recovery_duration_seconds", "From fault to usable again.", "part", "how"),
    _times("recovery_phase_seconds", "Length of each phase of a recovery.", "part", "phase"),
    _counter("actions_replayed_total", "Actions done again to bring a sandbox back to where it was."),
    _gauge("engine_serving", "1 while a worker serves, else 0."),
    _gauge("engine_generation", "Generation of the newest worker; each replacement raises it."),
    _gauge("engine_standby_armed", "1 while a warmed-up shadow stands by, else 0."),
    _gauge("engine_owner_up", "1 while the process that holds weights and KV arena lives, else 0."),
    _gauge("engine_weights_epoch", "Weights epoch that serves."),
    _gauge("engine_policy_version", "Policy version that serves."),
    _times("engine_weights_update_seconds", "Wall time of a weights update."),
    _counter("engine_stale_dropped_total", "Late messages of fenced workers that were refused."),
    _counter("engine_adopted_blocks_total", "Sealed KV blocks that a promoted shadow took over."),
    _gauge("sandboxes_running", "Sandboxes alive."),
    _gauge("journal_bytes", "Size of the run's journal on disk."),
)
