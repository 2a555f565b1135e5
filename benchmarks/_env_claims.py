"""What `belayer bench env` is held against."""

from __future__ import annotations

from typing import Any

# workload: (seconds frozen, seconds from the signal to the first answer)
LIMITS = {
    "idle shell": (0.030, 0.040),
    "process with 100 MB": (0.090, 0.100),
    "20,000 changed files, 400 MB": (0.130, 0.080),
}
FORK_S = 8 * 0.040  # eight forks of an idle shell, its checkpoint included
RATIOS = {"new_container_replay": 3.5, "podman": 4.0}


def claims(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each limit with what was measured (medians) and whether it was kept; None where nothing was measured."""
    by_name = {cell["workload"]: cell for cell in cells}
    found = []
    for workload, (frozen_s, recovery_s) in LIMITS.items():
        cell = by_name.get(workload)
        frozen = cell["checkpoint"]["frozen"]["median_s"] if cell else None
        recovery = cell["subject"]["median_s"] if cell else None
        found.append(_at_most(f"{workload}: frozen", frozen, frozen_s))
        found.append(_at_most(f"{workload}: kill → first exec", recovery, recovery_s))
    idle = by_name.get("idle shell")
    found.append(_at_most("idle shell: fork of 8", idle["fork_of_8"]["median_s"] if idle else None, FORK_S))
    for baseline, least in RATIOS.items():
        for workload, cell in by_name.items():
            ratio = cell["ratios"].get(baseline)
            kept = None if ratio is None else ratio >= least
            claim = f"{workload}: faster than {baseline}"
            found.append({"claim": claim, "value": ratio, "limit": least, "unit": "x", "kept": kept})
    return found


def _at_most(claim: str, seconds: float | None, limit_s: float) -> dict[str, Any]:
    value = None if seconds is None else seconds * 1e3
    kept = None if seconds is None else seconds <= limit_s
    return {"claim": claim, "value": value, "limit": limit_s * 1e3, "unit": "ms", "kept": kept}
