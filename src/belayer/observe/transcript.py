"""One rollout as a story: every turn, action, checkpoint, loss and cut in the order of the journal.

Unlike a `History`, which holds only what counts, a transcript keeps what was cut off, and marks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from belayer.journal import AnyRecord, Gone
from belayer.journal import records as r
from belayer.recovery.actions import action_of, describe, from_journal

Decode = Callable[[list[int]], str]


class Entry(msgspec.Struct, omit_defaults=True):
    """One line of the story. `void`: it was cut off later and reaches no trainer. Unused fields are not encoded."""

    attempt: int
    kind: str
    call: int | None = None
    void: bool = False
    ids: list[int] = []
    text: str | None = None
    logprobs: list[float] = []
    versions: list[int] = []
    finish: str = ""
    k: int | None = None
    generation: int | None = None
    action: str = ""
    result: str | None = None
    wall_s: float | None = None
    detail: str = ""


def transcript(records: Iterable[AnyRecord], rollout: str, decode: Decode | None = None) -> list[Entry]:
    """The entries of `rollout`, oldest first. `decode` turns token ids into text."""
    entries: list[Entry] = []
    for record in records:
        if record.rollout == rollout:
            _add(entries, record)
    if decode is not None:
        for entry in entries:
            if entry.ids:
                entry.text = decode(entry.ids)
    return entries


def tokenizer_of(run: Path, model: str | None) -> Decode | None:
    """How to read token ids of a run: by the tokenizer of the trained model or of the model folder, if one is there."""
    for folder in (run / "trainer" / "model", Path(model) if model else None):
        file = folder / "tokenizer.json" if folder is not None else None
        if file is not None and file.is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))
            return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    return None


def _add(entries: list[Entry], record: AnyRecord) -> None:
    attempt = record.attempt

    def new(kind: str, **fields: Any) -> Entry:
        entries.append(Entry(attempt, kind, **fields))
        return entries[-1]

    match record:
        case r.RolloutStarted():
            image = f", image {record.image}" if record.image else ""
            new("started", detail=f"seed {record.seed}, task {record.task!r}{image}")
        case r.TokensAppended():
            kind = "turn" if record.source == "model" else "observation"
            entry = _open(entries, attempt, kind, record.call) or new(kind, call=record.call)
            entry.ids = entry.ids + record.ids
            entry.logprobs = entry.logprobs + record.logprobs
            if kind == "turn":
                entry.versions = sorted({*entry.versions, record.weights_version})
                entry.finish = record.finish
        case r.TurnVoided():
            if (entry := _open(entries, attempt, "turn", record.call)) is not None:
                entry.void = True
            new("turn voided", call=record.call, detail=record.reason)
        case r.ActionIntended():
            new("action", call=record.call, k=record.k, generation=record.g, action=describe(action_of(record.asked)))
        case r.ActionCompleted():
            entry = _open(entries, attempt, "action", record.call)
            if entry is not None:
                entry.result, entry.wall_s = _shown(record.result), record.wall_s
                entry.detail = f"damage of its own: {record.damage}" if record.damage else ""
        case r.ValueDrawn():
            new("value", call=record.call, detail=f"{record.what} = {record.value}")
        case r.CheckpointPublished():
            new("checkpoint", k=record.k, generation=record.g, detail=_checkpoint(record))
        case r.CheckpointSkipped():
            new("no checkpoint", k=record.k, detail=record.why)
        case r.PolicyChanged():
            new("policy", k=record.k, detail=f"{record.policy} decides from here on, not {record.was}")
        case r.EnvRestored():
            if (entry := _unfinished(entries, attempt)) is not None:
                entry.void, entry.detail = True, "the environment was lost before it had completed"
            origin = f"checkpoint {record.checkpoint}" if record.checkpoint else "a new container"
            detail = f"from {origin}, {record.replayed} actions done again; lost because: {record.reason}"
            new("restored", k=record.k, generation=record.g, detail=detail)
        case r.ContextTruncated():
            for entry in entries:
                if entry.attempt == attempt and entry.call is not None and entry.call >= record.call:
                    entry.void = True
            new("context cut", call=None, k=record.k, detail=f"at token {record.position}: {record.reason}")
        case r.RolloutFinished():
            new("finished", detail=f"reward {record.reward}")
        case r.RolloutFailed():
            new("failed", detail=f"{record.error}: {record.reason}")
        case r.GroupFailed():
            new("group failed", detail=f"{record.group} stays short of it: {record.reason}")
        case r.Acknowledged():
            new("delivered")


def _checkpoint(record: r.CheckpointPublished) -> str:
    return f"{record.id}, level {record.level}{'; ' + record.why if record.why else ''}"


def _open(entries: list[Entry], attempt: int, kind: str, call: int) -> Entry | None:
    """The entry of this call that is still being added to."""
    for entry in reversed(entries):
        if entry.attempt != attempt:
            return None
        if entry.call == call and entry.kind == kind and not entry.void:
            return entry
    return None


def _unfinished(entries: list[Entry], attempt: int) -> Entry | None:
    actions = [entry for entry in entries if entry.kind == "action" and entry.attempt == attempt]
    return actions[-1] if actions and actions[-1].result is None and not actions[-1].void else None


def _shown(result: Any) -> str:
    live = from_journal(result)
    if isinstance(live, Gone):
        where = "in an archive that cannot be read" if live.archived else "not kept"
        return f"[{live.size} bytes, {where}: the rollout was acknowledged]"
    text = getattr(live, "text", None)
    shown = repr(live) if text is None else text
    code = getattr(live, "exit_code", None)
    marks = [f"exit {code}"] if code else []
    marks += [name for name in ("timed_out", "truncated", "oom") if getattr(live, name, False)]
    return shown + (f" ({', '.join(marks)})" if marks else "")
