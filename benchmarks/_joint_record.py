"""What the joint campaign keeps: of each fault, of each trajectory, and what its drivers' logs say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from belayer.faults.joint_kinds import JointFault
from belayer.journal import read_histories

from . import _campaign
from ._joint_task import Outcome


class Record(msgspec.Struct):
    """What became of one fault. `survived`: everything that it could have hurt came out right."""

    index: int
    point: str
    kind: str
    injected: bool = False
    survived: bool = True
    why: str = ""
    rollout: str = ""
    round: int = 0


class Saved(_campaign.Saved, kw_only=True):
    """Everything that a campaign has found out so far."""

    rollouts: int
    plan: str  # see `_joint_settings.plan`
    calm: list[Outcome] = msgspec.field(default_factory=list)
    struck: list[Outcome] = msgspec.field(default_factory=list)
    records: list[Record] = msgspec.field(default_factory=list)
    pending: list[JointFault] = msgspec.field(default_factory=list)
    tries: dict[int, int] = msgspec.field(default_factory=dict)
    drawn: int = 0
    rounds: int = 0
    sessions: int = 0
    restores: int = 0
    truncations: int = 0
    verified: int = 0
    unstarted: list[str] = msgspec.field(default_factory=list)

    @property
    def injected(self) -> int:
        return sum(record.injected for record in self.records)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one of a killed driver may be torn."""
    entries: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        if line:
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
    return entries


def acknowledged_in(run: Path) -> set[str]:
    return {name for name, history in read_histories(run / "journal").items() if history.acknowledged}


def counted(records: list[Record]) -> dict[str, Counter[str]]:
    """Injected faults by failpoint and kind."""
    table: dict[str, Counter[str]] = {}
    for record in records:
        if record.injected:
            table.setdefault(record.point, Counter())[record.kind] += 1
    return table


def outcomes_in(entries: list[dict[str, Any]]) -> list[Outcome]:
    return [msgspec.convert(entry["outcome"], Outcome) for entry in entries if entry["what"] == "delivered"]
