"""Set up, checkpoint, damage, kill, restore, compare; twice; and in a fork."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from .protocol import Box, Refused, Runtime
from .shells import SHELLS
from .table import INSIDE, entry

STAGES = ("restored", "restored twice", "forked")
HOME = "/opt/conformance"
BIG_MB = os.environ.get("CONFORMANCE_BIG_MB", "128")  # memory of the big process
SHARE = 24  # resources in one sandbox, at most

Verdict = str | None  # None: as it was; else what is wrong. "skipped: …" where the image or the runtime lacks something
Verdicts = dict[str, dict[str, Verdict]]  # by resource, by stage


def arrange(wanted: list[str], share: int = SHARE) -> list[list[str]]:
    """Which resources share a sandbox, so that they need not one each; at most `share` do."""
    by_group: dict[str, list[str]] = {}
    for name in wanted:
        by_group.setdefault(entry(name).group, []).append(name)
    groups = []
    for members in by_group.values():
        parts = -(-len(members) // share)
        groups += [members[part::parts] for part in range(parts)]
    return groups


class Trial:
    """Some resources in one sandbox. `box` is replaced by what restores return."""

    def __init__(self, box: Box, names: list[str]) -> None:
        self.box = box
        self.names = names
        self.wrong: dict[str, str] = {}  # what could not even be set up

    async def setup(self) -> None:
        for path in sorted(INSIDE.glob("*.py")):
            await self.box.write(f"{HOME}/inside/{path.name}", path.read_bytes())
        for name, found in (await self.ask("start"))[0].items():
            if "ok" not in found:
                self.wrong[name] = f"skipped: {found['missing']}" if "missing" in found else f"set-up: {found['error']}"
        self.names = [name for name in self.names if name not in self.wrong]

    async def ask(self, *actions: str, box: Box | None = None, names: list[str] | None = None) -> list[dict[str, Any]]:
        """The answers of all resources (or `names`) to each action: `start`, `probe`, `use`, `damage`."""
        names = self.names if names is None else names
        box = box or self.box
        found: list[dict[str, Any]] = [{} for _ in actions]
        for name in names:
            for number, action in enumerate(actions if name in SHELLS else ()):
                code, output = await box.shell(getattr(SHELLS[name], "setup" if action == "start" else action))
                text = output.decode(errors="replace")
                good = code == 0 or action == "damage"
                found[number][name] = {"ok": text} if good else {"error": f"exit {code}: {text[-400:]}"}
        if programs := [name for name in names if name not in SHELLS]:
            command = [f"CONFORMANCE_BIG_MB={BIG_MB}", "python3", "-I", "-S", f"{HOME}/inside/run.py"]
            code, output = await box.exec(["/usr/bin/env", *command, ",".join(actions), *programs], timeout_s=150.0)
            if code:
                raise RuntimeError(f"the resources cannot be asked ({actions}): exit {code}: {output[-800:]!r}")
            for number, answers in enumerate(json.loads(output)):
                found[number] |= answers
        return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Verdict]:
    """By resource: None, or both sides where the state is not what it was."""
    found: dict[str, Verdict] = {}
    for name, was in before.items():
        is_now = now.get(name, {"error": "no answer"})
        if "error" in was:
            found[name] = f"could not be looked at before the checkpoint: {was['error']}"
        elif is_now != was:
            found[name] = _both(was, is_now)
        else:
            found[name] = None
    return found


def _both(was: dict[str, Any], is_now: dict[str, Any]) -> str:
    before, now = was.get("ok"), is_now.get("ok", is_now)
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        changed = [key for key in before if before[key] != now[key]]
        before, now = {key: before[key] for key in changed}, {key: now[key] for key in changed}
    return f"was {json.dumps(before, ensure_ascii=False)[:500]}, is {json.dumps(now, ensure_ascii=False)[:500]}"


def merge(found: dict[str, Verdict], used: dict[str, Any]) -> dict[str, Verdict]:
    """What comparing found, and, where that was nothing, what using found."""
    return {
        name: verdict or (f"does not work: {used[name]['error']}" if "error" in used.get(name, {}) else None)
        for name, verdict in found.items()
    }


async def run_group(
    runtime: Runtime, names: list[str], *, note: Callable[[str, float], None] = lambda what, seconds: None
) -> Verdicts:
    """The verdicts of some resources that share a sandbox.

    Where they cannot be checkpointed or restored together each is tried alone, so that every verdict is its own.
    """
    try:
        return await _run(runtime, names)
    except Exception as error:
        if len(names) == 1:
            why = f"{'refused' if isinstance(error, Refused) else type(error).__name__}: {error}"
            return {names[0]: dict.fromkeys(STAGES, why)}
    found: Verdicts = {}
    for name in names:
        found |= await run_group(runtime, [name])
    return found


async def _run(runtime: Runtime, names: list[str]) -> Verdicts:
    box = await runtime.create()
    trial = Trial(box, list(names))
    boxes: list[Box] = []
    try:
        await trial.setup()
        verdicts: Verdicts = {name: dict.fromkeys(STAGES, trial.wrong.get(name)) for name in names}
        (before,) = await trial.ask("probe")
        for stage in STAGES[:2]:
            token = await trial.box.checkpoint()
            await trial.ask("damage")
            await trial.box.kill()
            trial.box = await trial.box.restore(token)
            now, used, after = await trial.ask("probe", "use", "probe")
            _enter(verdicts, stage, merge(differences(before, now), used))
            before = after
        try:
            boxes.append(await trial.box.fork())
        except NotImplementedError as error:
            _enter(verdicts, STAGES[2], dict.fromkeys(trial.names, f"skipped: {error}"))
            return verdicts
        now, used = await trial.ask("probe", "use", box=boxes[0])
        _enter(verdicts, STAGES[2], merge(differences(before, now), used))
        (now,) = await trial.ask("probe")
        _enter(verdicts, STAGES[2], differences(before, now))  # the original is where it was, whatever the fork did
        return verdicts
    finally:
        await _close([*boxes, trial.box])


def _enter(verdicts: Verdicts, stage: str, found: dict[str, Verdict]) -> None:
    for name, verdict in found.items():
        verdicts[name][stage] = verdicts[name][stage] or verdict


async def _close(boxes: list[Box]) -> None:
    closing: list[Callable[[], Awaitable[None]]] = [box.close for box in boxes]
    for close in closing:
        await close()
