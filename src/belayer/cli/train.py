"""`belayer train` and `belayer resume`: the training job on a terminal."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from belayer import events
from belayer.config import Config, load_config
from belayer.errors import BelayerError, ConfigError, RunError
from belayer.files import write_atomically
from belayer.journal import compare_runs
from belayer.observe import (
    MetricsLog,
    RunSummary,
    Summary,
    open_view,
    open_watchers,
    read_summary,
    write_report,
    write_timeline,
)
from belayer.run import open_directory
from belayer.run_directory import RunDirectory, read_about
from belayer.training.task import load_task
from belayer.verify import verify_run

console = Console(highlight=False, soft_wrap=True)
JOB_FILE = "job.json"


def train_command(
    path: Path,
    *,
    inject: bool | None,
    reference: bool,
    run_dir: Path | None,
    seed: int | None,
    steps: int | None,
    plain: bool,
    metrics_port: int | None = None,
) -> int:
    config = load_config(
        path,
        {
            "faults.inject": inject,
            "run.seed": seed,
            "train.steps": steps,
            "observe.metrics_port": metrics_port,
        },
    )
    if config.train is None:
        raise ConfigError(f"{path} has no [train] section")
    load_task(config.train.task, path.absolute().parent)  # a wrong name should be said before a run is made
    directory = (run_dir or _free_directory(path.stem)).absolute()
    if (directory / "run.json").exists():
        raise RunError(
            f"{directory} holds a run already",
            kept="that run, untouched",
            next_step=f"`belayer resume {directory}` finishes it, or choose another --run-dir",
        )
    return _job(config, path.absolute().parent, directory, reference=reference, plain=plain)


def resume_command(directory: Path, *, plain: bool, metrics_port: int | None = None) -> int:
    directory = directory.absolute()
    try:
        job = json.loads((directory / JOB_FILE).read_text())
        config = Config.model_validate(job["config"])
        base, reference = Path(job["base"]), bool(job["reference"])
    except (FileNotFoundError, NotADirectoryError):
        if (directory / "run.json").exists():
            if "gateway" in read_about(directory):
                raise RunError(
                    f"{directory} is the run of a gateway, not of `belayer train`",
                    kept="the run, untouched",
                    next_step=f"`belayer serve` with --run-dir {directory} serves its sessions again",
                ) from None
            raise RunError(
                f"{directory} was made by a program of yours, not by `belayer train`",
                kept="the run, untouched",
                next_step="start that program again: Run.open goes on from the journal",
            ) from None
        raise RunError(f"there is no run at {directory}", next_step="check the path") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{directory / JOB_FILE} is damaged: {error}",
            kept="the journal beside it",
            next_step="restore it from a copy, or start the job anew in another --run-dir",
        ) from None
    if metrics_port is not None:
        observe = config.observe.model_copy(update={"metrics_port": metrics_port})
        config = config.model_copy(update={"observe": observe})
    return _job(config, base, directory, reference=reference, plain=plain)


def _free_directory(name: str) -> Path:
    for number in range(1, 10_000):
        candidate = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not (candidate / "run.json").exists():
            return candidate
    raise RunError(f"runs/ is full of runs named {name}", next_step="give --run-dir")


def _job(config: Config, base: Path, directory: Path, *, reference: bool, plain: bool) -> int:
    held = open_directory(directory, config)  # the lock before the first byte: another process may be at work here
    try:
        if not (directory / JOB_FILE).exists():
            job = {"config": config.model_dump(mode="json"), "base": str(base), "reference": reference}
            write_atomically(directory / JOB_FILE, json.dumps(job, indent=1).encode())
        summary = _finished(directory)
    except BaseException:
        held.close()
        raise
    console.print(f"run directory: {directory}")
    try:
        if summary is None:
            summary = _one_run(config, base, held, title=directory.name, plain=plain)
        else:
            held.close()
        if reference:
            summary = _reference(config, base, directory, plain=plain)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"\nstopped; everything is cleaned up. `belayer resume {directory}` goes on from here.")
        return 130
    except BelayerError as error:
        if isinstance(error, ConfigError) and not (directory / "journal").exists():
            # resuming would use the configuration that was saved, with the mistake in it
            console.print(f"\nnothing has run; correct the configuration and start anew (and delete {directory})")
            raise
        console.print(f"\n`belayer resume {directory}` goes on from here once the cause is repaired.")
        raise
    write_timeline(directory)
    console.print(f"summary: {directory / 'summary.json'}")
    console.print(f"report:  {write_report(directory, directory / 'reference' if reference else None)}")
    _print_verdict(summary)
    verdict = verify_run(directory)
    if verdict.consistent:
        console.print(f"verified: all {verdict.rollouts} rollouts describe what their environment did")
    else:
        broken = len(verdict.findings) + len(verdict.damage)
        console.print(f"NOT consistent: {broken} broken promises; `belayer verify {directory}` prints them")
    same = not summary.tokens_changed and summary.rollouts_identical == summary.rollouts_compared
    good = summary.ok and not summary.lost and not summary.duplicated and same and verdict.consistent
    return 0 if good else 1


def _finished(directory: Path) -> RunSummary | None:
    """The summary of a run that has reached its end, or None."""
    path = directory / "summary.json"
    summary = read_summary(path) if path.exists() else None
    return summary if summary is not None and summary.finished else None


def _one_run(config: Config, base: Path, held: RunDirectory, *, title: str, plain: bool) -> RunSummary:
    from belayer.training.job import run_job

    directory = held.path
    metrics_path = directory / "metrics.jsonl"
    summary = Summary.from_metrics(metrics_path) if metrics_path.exists() else Summary()
    with ExitStack() as stack:
        try:
            watchers = stack.enter_context(open_watchers(config.observe, directory, served=_say_where))
        except BaseException:
            held.close()
            raise
        metrics = stack.enter_context(MetricsLog(metrics_path))
        view = stack.enter_context(open_view(title, plain=plain))

        async def main() -> RunSummary:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None

            def stop() -> None:
                # once: a second SIGTERM must not cancel the clean-up
                loop.add_signal_handler(signal.SIGTERM, lambda: None)
                task.cancel()

            loop.add_signal_handler(signal.SIGTERM, stop)  # SIGTERM cleans up exactly as Ctrl-C does
            sink = events.fan_out(metrics, summary, view, *watchers)
            try:
                outcome = await run_job(config, base, held, sink=sink, say=console.print)
                started, delivered, duplicated = outcome.journal_counts
                summary.set_rollouts(started=started, delivered=delivered, duplicated=duplicated)
                if outcome.faults_skipped:
                    left_out = ", ".join(sorted(outcome.faults_skipped))
                    console.print(f"{len(outcome.faults_skipped)} faults found no target in time: {left_out}")
            finally:
                summary.write(directory / "summary.json")
            return summary.result()

        return asyncio.run(main())


def _say_where(url: str) -> None:
    console.print(f"metrics: {url}")


def _reference(config: Config, base: Path, directory: Path, *, plain: bool) -> RunSummary:
    """Run the same seed without faults, compare, and put the result into the first run's metrics and summary."""
    other = directory / "reference"
    calm = config.model_copy(update={"faults": config.faults.model_copy(update={"inject": False})})
    if _finished(other) is None:
        console.print("the same seed again, without faults")
        _one_run(calm, base, open_directory(other, calm), title=f"{directory.name} without faults", plain=plain)
    found = compare_runs(directory, other)
    data = {
        "reference": str(other),
        "rollouts_compared": found.rollouts_compared,
        "rollouts_identical": found.rollouts_identical,
        "tokens_compared": found.tokens_compared,
        "tokens_changed": found.tokens_changed,
    }
    with MetricsLog(directory / "metrics.jsonl") as metrics:
        metrics(events.Event(kind=events.RUN_COMPARED, data=data))
    from belayer.training.job import journal_counts

    summary = Summary.from_metrics(directory / "metrics.jsonl")
    started, delivered, duplicated = journal_counts(directory)
    summary.set_rollouts(started=started, delivered=delivered, duplicated=duplicated)
    if found.first_difference:
        console.print(f"first difference: {found.first_difference}", markup=False)
    return summary.write(directory / "summary.json")


def _print_verdict(summary: RunSummary) -> None:
    changed = "not compared" if summary.tokens_changed is None else f"{summary.tokens_changed} changed"
    console.print(
        f"{summary.rollouts_delivered} of {summary.rollouts_started} rollouts delivered, {summary.lost} lost, "
        f"{summary.duplicated} duplicated; {summary.rollouts_identical} of {summary.rollouts_compared} "
        f"compared rollouts identical, {summary.tokens_compared} tokens compared, {changed}; "
        f"{len(summary.recoveries)} recoveries"
    )
    if summary.reward_first is not None and summary.reward_last is not None:
        console.print(f"reward {summary.reward_first:.3f} -> {summary.reward_last:.3f} in {summary.wall_s:.0f} s")
