"""Fault campaigns: random faults on living systems under load; nothing may be lost, repeated, changed, stuck or left.

Without one of the two flags below: whole rollouts on a living engine and living sandboxes, struck at every failpoint of
the protocol by every kind of fault, the death of the driver and a full disk among them; see `_joint_campaign`.

`--engine`: SIGKILL, SIGSEGV, SIGABRT, SIGBUS and SIGSTOP of the worker, the same of its shadow, SIGKILL and SIGSTOP of
the owner, SIGKILL of the nursery, double faults, and kills at every failpoint of a weights update; at seeded random
moments, while six requests are always in flight. Every completion is compared, token by token and logprob by logprob,
with what the undisturbed engine says (float32). At the end nothing of the engine may be left on the host, and neither
descriptors nor memory may have grown.

`--sandbox`: sandboxes that hold everything a checkpoint must capture are killed and restored, and every state compared;
see `_sandbox_rounds`.

`--faults N` injects N faults (2,000; engine: 1,000; sandboxes: 500), `--seed S` others. A campaign that was stopped
goes on with `--resume`. With `--quick` a campaign ends within a minute; whole rollouts need more, for each of three to
five drivers starts an engine: 24 rollouts without faults, and again under up to 27 faults, which are of every kind, the
death of the driver and a full disk included.
"""

from __future__ import annotations

import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from rich.console import Console

from belayer.config import EngineConfig
from belayer.errors import ConfigError

from . import _fault_campaign, _fault_report, _joint_campaign, _joint_report, _sandbox_report, _sandbox_rounds
from ._campaign import Campaign, S, state_file
from ._models import Model, folder

COUNT = {True: 40, False: 1000}
ROUNDS = {True: 40, False: 500}
JOINT = {True: 27, False: 2000}
JOINT_ROLLOUTS = {True: 24, False: 96}  # of every round
QUICK_S = 38.0  # no fault is struck later; the end comes on top

_console = Console(highlight=False, soft_wrap=True)
_SHOW = {"engine": _fault_report.show, "sandbox": _sandbox_report.show, "joint": _joint_report.show}


class Struck(msgspec.Struct, frozen=True):
    """An engine to strike, see workloads/faults.toml."""

    name: str
    share: float
    settings: dict[str, float | int | bool | str]
    quick: bool = False


class Workload(msgspec.Struct, frozen=True):
    model: Model
    engines: list[Struck]


def workload() -> Workload:
    """What workloads/faults.toml says. Raises `msgspec.ValidationError` for an entry that is not understood."""
    return msgspec.convert(tomllib.loads((Path(__file__).parent / "workloads" / "faults.toml").read_text()), Workload)


def engines_to_strike(plan: Workload, count: int, quick: bool) -> tuple[list[_fault_campaign.Kind], list[str]]:
    """The engines that can run here, and why others cannot. Who cannot leaves its share to the rest."""
    possible: list[tuple[Struck, EngineConfig]] = []
    skipped: list[str] = []
    model = plan.model
    for engine in plan.engines:
        if quick and not engine.quick:
            continue
        try:
            config = EngineConfig(
                model=folder(model),
                max_model_len=model.max_model_len,
                max_num_seqs=model.max_num_seqs,
                kv_bytes=model.kv_bytes,
                **engine.settings,  # pyright: ignore[reportArgumentType]
            )
        except ValidationError as error:
            skipped.append(f"{engine.name}: {error.errors()[0]['msg']}")
            continue
        possible.append((engine, config))
    whole = sum(engine.share for engine, _config in possible)
    kinds: list[_fault_campaign.Kind] = []
    share = 0.0
    for engine, config in possible:
        share += engine.share
        kinds.append(_fault_campaign.Kind(engine.name, config, round(count * share / whole)))
    return kinds, skipped


def bench(
    quick: bool,
    engine: bool = False,
    sandbox: bool = False,
    faults: int | None = None,
    seed: int = 0,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the campaign; the result is in the form of every bench, one cell for each kind of fault."""
    if engine and sandbox:
        raise ConfigError(
            "two campaigns were chosen", next_step="say --engine or --sandbox, or neither for whole rollouts"
        )
    if engine:
        return _engine(quick, faults or COUNT[quick], seed, resume)
    if sandbox:
        return _sandbox(quick, faults or ROUNDS[quick], seed, resume)
    return _joint(quick, faults or JOINT[quick], seed, resume)


def _engine(quick: bool, faults: int, seed: int, resume: bool) -> dict[str, Any]:
    plan = workload()
    engines, skipped = engines_to_strike(plan, faults, quick)
    for reason in skipped:
        _console.print(f"skipped: {reason}")
    logs = Path(tempfile.mkdtemp(prefix="belayer-bench-faults-"))
    campaign = _fault_campaign.Campaign(
        engines,
        plan.model,
        seed=seed,
        deadline=_deadline(quick),
        say=_console.print,
        state=state_file("engine", seed, quick=quick),
        logs=logs,
    )
    more = {"skipped": skipped, "logs": str(logs)}
    return _carry_out("engine", campaign, resume, lambda saved: _fault_report.result_of(saved) | more)


def _sandbox(quick: bool, rounds: int, seed: int, resume: bool) -> dict[str, Any]:
    campaign = _sandbox_rounds.Campaign(
        rounds,
        seed,
        deadline=_deadline(quick),
        say=_console.print,
        state=state_file("sandbox", seed, quick=quick),
    )
    return _carry_out("sandbox", campaign, resume, _sandbox_report.result_of)


def _joint(quick: bool, faults: int, seed: int, resume: bool) -> dict[str, Any]:
    campaign = _joint_campaign.Campaign(
        workload().model,
        faults=faults,
        rollouts=JOINT_ROLLOUTS[quick],
        seed=seed,
        quick=quick,
        state=state_file("joint", seed, quick=quick),
        say=_console.print,
    )
    return _carry_out("joint", campaign, resume, lambda saved: _joint_report.result_of(saved, faults, quick=quick))


def _carry_out(name: str, campaign: Campaign[S], resume: bool, report: Callable[[S], dict[str, Any]]) -> dict[str, Any]:
    """Also after Ctrl-C there is something to see."""

    def result() -> dict[str, Any]:
        return {"campaign": name} | report(campaign.saved)

    campaign.carry_out(resume=resume, stopped=lambda: show(result(), _console))
    return result()


def _deadline(quick: bool) -> float:
    return time.monotonic() + QUICK_S if quick else float("inf")


def show(result: dict[str, Any], console: Console) -> None:
    """The table of a campaign by kind of fault, and the totals."""
    _SHOW[result["campaign"]](result, console)
