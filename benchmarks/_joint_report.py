"""What the joint campaign came to: its figures, its tables, and whether faults changed what a trainer gets."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from belayer.faults.joint_kinds import KINDS, pairs, points

from ._campaign import show_verdict
from ._joint_record import Record, Saved, counted
from ._joint_task import Outcome

COUNTED = ("inconsistent", "changed", "lost", "duplicated", "not_acknowledged", "hung", "failed", "leaked")
DRAWS = 10_000


def sign_flips(differences: list[float], seed: int = 0) -> float:
    """Two-sided p of a paired permutation test: how often random signs make a mean as far from 0 as the one found.

    Exact where there are few pairs that differ; pairs that do not differ say nothing, and are part of the mean.
    """
    moved = [value for value in differences if value]
    found = abs(sum(moved))
    if not moved:
        return 1.0
    slack = 1e-12 * sum(abs(value) for value in moved)
    if len(moved) <= 12:
        signs = range(1 << len(moved))
        sums = (sum(v if bits >> place & 1 else -v for place, v in enumerate(moved)) for bits in signs)
        return sum(abs(total) >= found - slack for total in sums) / len(signs)
    rng = random.Random(f"signs {seed}")
    hits = sum(abs(sum(v if rng.random() < 0.5 else -v for v in moved)) >= found - slack for _ in range(DRAWS))
    return (hits + 1) / (DRAWS + 1)


def compared(calm: list[Outcome], struck: list[Outcome]) -> dict[str, Any]:
    """Length and reward with faults against without, by pairs of the same rollout."""
    without = {each.rollout: each for each in calm}
    by_name: dict[str, list[Outcome]] = {}
    for each in struck:
        by_name.setdefault(each.rollout, []).append(each)
    result: dict[str, Any] = {"pairs": len(by_name), "trajectories": len(struck)}
    for what in ("tokens", "reward"):
        with_faults = [statistics.fmean(getattr(e, what) for e in by_name[name]) for name in by_name]
        undisturbed = [float(getattr(without[name], what)) for name in by_name]
        differences = [round(a - b, 12) for a, b in zip(with_faults, undisturbed, strict=True)]  # means round
        spread = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        result[what] = {
            "without": statistics.fmean(undisturbed) if undisturbed else None,
            "with": statistics.fmean(with_faults) if with_faults else None,
            "difference": statistics.fmean(differences) if differences else None,
            "ci95": 1.96 * spread,
            "p": sign_flips(differences),
            "pairs_that_differ": sum(bool(value) for value in differences),
        }
    fickle = {each.rollout for each in calm if each.fickle}
    exact = [each for each in struck if each.rollout not in fickle]
    result["compared_token_by_token"] = len(exact)
    return result


def result_of(saved: Saved, wanted: int, *, quick: bool) -> dict[str, Any]:
    """The result in the form of every bench, one cell for each kind of fault."""
    checks = {name: saved.found.get(name, 0) for name in COUNTED}
    struck = [record for record in saved.records if record.injected]
    checks["not_survived"] = sum(not record.survived for record in struck)
    if not quick:
        checks["faults_missing"] = max(0, wanted - len(struck))
    checks["nothing_struck"] = int(not struck)
    seen = {(record.point, record.kind) for record in struck}
    never = [f"{point} × {kind}" for point, kind in pairs() if (point, kind) not in seen]
    return {
        "ok": not any(checks.values()),
        "seed": saved.seed,
        "injected": len(struck),
        "pairs": len(pairs()),
        "pairs_struck": len(seen),
        "pairs_never_struck": never,
        "rounds": saved.rounds,
        "drivers": saved.sessions,
        "drivers_not_started": saved.unstarted,
        "rollouts": len(saved.struck),
        "restores": saved.restores,
        "truncations": saved.truncations,
        "rollouts_verified": saved.verified,
        "compared": compared(saved.calm, saved.struck),
        "by_point": {point: dict(kinds) for point, kinds in counted(saved.records).items()},
        "checks": checks,
        "wrong": saved.details,
        "wall_s": saved.wall_s,
        "cells": [_cell(kind, [r for r in saved.records if r.kind == kind]) for kind in KINDS],
    }


def _cell(kind: str, records: list[Record]) -> dict[str, Any]:
    struck = [record for record in records if record.injected]
    return {
        "workload": kind,
        "injected": len(struck),
        "survived": sum(record.survived for record in struck),
        "subject": {"median_s": None, "samples_s": []},
        "baselines": {},
        "ratios": {},
        "checks": {"not_survived": sum(not record.survived for record in struck)},
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Injected faults by failpoint and kind, the totals, and the comparison with the undisturbed run."""
    short = {kind: kind.replace("sandbox", "box").replace("checkpoint", "image").replace(".", "\n") for kind in KINDS}
    short = {kind: text.replace("sig", "") for kind, text in short.items()}
    table = Table("failpoint", *short.values(), title="belayer bench faults: injected, by failpoint and kind")
    for point in points():
        kinds = Counter(result["by_point"].get(point, {}))
        table.add_row(point, *(str(kinds[kind] or "") for kind in KINDS))
    total = {cell["workload"]: cell for cell in result["cells"]}
    table.add_section()
    table.add_row("injected", *(str(total[kind]["injected"]) for kind in KINDS))
    table.add_row("survived", *(str(total[kind]["survived"]) for kind in KINDS))
    console.print(table)
    console.print(
        f"{result['injected']} faults (seed {result['seed']}) in {result['wall_s']:.0f} s, {result['pairs_struck']} of "
        f"{result['pairs']} pairs of failpoint and kind; {result['rounds']} rounds, {result['drivers']} drivers "
        f"({len(result['drivers_not_started'])} of them could not start their engine in time), "
        f"{result['restores']} environments restored, {result['truncations']} contexts cut"
    )
    found = result["compared"]
    console.print(
        f"{result['rollouts_verified']} rollouts examined by belayer verify; {found['trajectories']} trajectories, "
        f"{found['compared_token_by_token']} of them compared token by token with the undisturbed run"
    )
    for what, name in (("tokens", "length in tokens"), ("reward", "reward")):
        each = found[what]
        if each["with"] is not None:
            console.print(
                f"mean {name}: {each['without']:.4f} without faults, {each['with']:.4f} with; difference "
                f"{each['difference']:+.4f} ± {each['ci95']:.4f}, paired permutation test p = {each['p']:.3f} "
                f"({each['pairs_that_differ']} of {found['pairs']} pairs differ)"
            )
    show_verdict(result, console)
