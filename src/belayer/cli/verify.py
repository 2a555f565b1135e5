"""`belayer verify`: the verdict of the independent checker on a run, for people and for programs."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from belayer.cli.inspect import need_run
from belayer.config import SandboxConfig
from belayer.errors import ConfigError
from belayer.ownership import RunLabel
from belayer.ownership.reap import reap
from belayer.run_directory import configured, read_about
from belayer.sandbox import Sandboxes
from belayer.verify import Reexecution, Verdict, reexecute, verify_run

SHOWN = 20
console = Console(highlight=False, soft_wrap=True)


def verify_command(run: Path, *, replay: int, seed: int, as_json: bool) -> int:
    """Print the verdict; 0 for a consistent run whose replayed actions, if any, observed the same."""
    need_run(run)
    if replay < 0:
        raise ConfigError(f"--replay {replay} is not a number of rollouts", next_step="give 0 or more")
    verdict = verify_run(run)
    again = asyncio.run(_replay(run, replay, seed)) if replay else None
    if as_json:
        found = {"consistent": verdict.consistent, **msgspec.to_builtins(verdict)}
        console.print_json(data=found | ({"replay": msgspec.to_builtins(again)} if again else {}))
    else:
        _print(run, verdict, again)
    return 0 if verdict.consistent and not (again and again.differences) else 1


async def _replay(run: Path, count: int, seed: int) -> Reexecution:
    config = SandboxConfig.model_validate(configured(read_about(run), "sandbox"))
    await asyncio.to_thread(reap)
    with RunLabel.new(f"verify {run}") as label, tempfile.TemporaryDirectory(prefix="belayer-verify-") as folder:
        sandboxes = await Sandboxes.open(config, label, checkpoints=Path(folder))
        try:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("rollouts executed again", total=count)
                return await reexecute(
                    run,
                    sandboxes,
                    count,
                    seed=seed,
                    progress=lambda done, of: bar.update(task, completed=done, total=of),
                )
        finally:
            await sandboxes.close()


def _print(run: Path, verdict: Verdict, again: Reexecution | None) -> None:
    console.print(
        f"{verdict.rollouts} rollouts in {verdict.records} records: {verdict.finished} finished "
        f"({verdict.delivered} delivered), {verdict.failed} failed, {verdict.unfinished} unfinished; "
        f"{verdict.restores} restored environments, {verdict.truncated_tokens} tokens cut off"
    )
    if verdict.results_gone:
        console.print(f"{verdict.results_gone} results of acknowledged rollouts were taken out by run.retention")
    if verdict.short_groups:
        console.print(f"groups of which a member failed for good, as journalled: {', '.join(verdict.short_groups)}")
    if verdict.failed_groups:
        console.print(f"groups that were given up, as journalled: {', '.join(verdict.failed_groups)}")
    if verdict.unread:
        console.print(f"journal: {verdict.unread}", markup=False)
    for what in verdict.damage:
        if what != verdict.unread:
            console.print(f"damaged: {what}", markup=False)
    for finding in verdict.findings[:SHOWN]:
        console.print(f"broken: {finding.rollout}, attempt {finding.attempt}: {finding.what}", markup=False)
    if len(verdict.findings) > SHOWN:
        console.print(f"… and {len(verdict.findings) - SHOWN} more; --json has all of them")
    if verdict.consistent and not verdict.records:
        console.print("nothing to examine: nothing was journalled yet")
    elif verdict.consistent:
        console.print("consistent: every context describes what its environment did")
    elif not verdict.findings:
        console.print(
            "NOT consistent: no record contradicts another, but something of this run is damaged or gone. Do not go on "
            "with it as it is: repair what can be repaired, restore it from a copy, or start the run anew."
        )
    else:
        console.print(
            f"NOT consistent: {len(verdict.findings)} broken promises. Do not train on these rollouts; "
            f"`belayer show {run} ROLLOUT` prints one. Please report it with its journal."
        )
    if again is None:
        return
    console.print(
        f"executed again: {again.rollouts} rollouts, {again.actions} actions, {len(again.differences)} differences"
    )
    for each in again.differences[:SHOWN]:
        console.print(f"differs: {each.rollout}, action {each.k} ({each.action})", markup=False)
        console.print(f"  journal: {each.journalled}\n  now:     {each.now}", markup=False)
