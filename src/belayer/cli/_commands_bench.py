"""`belayer bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from belayer.cli._root import app


@app.command
def bench(
    name: str,
    *,
    quick: Annotated[
        bool, Parameter(negative="", help="Fewer samples and workloads; ends within about a minute (faults: three).")
    ] = False,
    json: Annotated[Path | None, Parameter(help="Write machine, versions and every sample to this file.")] = None,
    engine: Annotated[
        bool | None, Parameter(negative="", help="faults: strike the rollout engine. overhead: measure it alone.")
    ] = None,
    sandbox: Annotated[bool | None, Parameter(negative="", help="faults: kill and restore sandboxes.")] = None,
    faults: Annotated[int | None, Parameter(help="faults: how many; 2,000 (engine 1,000, sandbox 500).")] = None,
    seed: Annotated[int | None, Parameter(help="faults: which ones, and when; default 0.")] = None,
    resume: Annotated[
        bool | None, Parameter(negative="", help="faults: go on with a campaign that was stopped.")
    ] = None,
    run: Annotated[
        Path | None,
        Parameter(help="policy: the turns of this `train` run instead of drawn ones. calibration: the run to look at."),
    ] = None,
    turns: Annotated[
        Literal["waits", "inference", "step"] | None,
        Parameter(help="overhead: only turns that are waits, or real ones; or sandboxes that all wait in step."),
    ] = None,
    scale: Annotated[
        float | None, Parameter(help="overhead, e2e: turns last so much of their published length.")
    ] = None,
    policy: Annotated[
        Literal["adaptive", "always", "never", "every-n", "young-daly", "paper"] | None,
        Parameter(help="overhead: who decides about checkpoints; default adaptive."),
    ] = None,
    train: Annotated[bool | None, Parameter(negative="", help="e2e: train a model instead of replaying turns.")] = None,
    kills: Annotated[int | None, Parameter(help="gateway: kills of the worker; default 100, quick 10.")] = None,
) -> int:
    """Measure recovery against its baselines, or strike with random faults, in one command.

    NAME is `worker`, `env`, `overhead`, `e2e`, `faults`, `gateway`, `policy` (simulated) or `calibration`. Exits
    non-zero when a correctness check inside fails; the figures themselves never fail it.

    Example: `belayer bench faults --engine --quick`
    """
    from belayer.cli.bench import bench_command

    return bench_command(
        name,
        quick=quick,
        json_path=json,
        engine=engine,
        sandbox=sandbox,
        faults=faults,
        seed=seed,
        resume=resume,
        run=run,
        turns=turns,
        scale=scale,
        policy=policy,
        train=train,
        kills=kills,
    )
