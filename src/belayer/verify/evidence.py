"""What else a run directory says, beside the records: whether anything of it is damaged, or gone from the journal."""

from __future__ import annotations

from pathlib import Path

from belayer import events
from belayer.errors import RunError
from belayer.observe.metrics import read_metrics
from belayer.run_directory import read_about
from belayer.verify.witness import Attempt

_CLAIMS = {
    events.ROLLOUT_STARTED: "started",
    events.ROLLOUT_FINISHED: "finished",
    events.ROLLOUT_DELIVERED: "delivered",
}

Claims = dict[tuple[str, str, int], None]


def description_problem(run: Path) -> str:
    """Why run.json cannot be used; empty if it can, or is not there (a journal alone may be examined too)."""
    try:
        if (run / "run.json").is_file():
            read_about(run)
    except RunError as error:
        return str(error)
    return ""


def read_claims(run: Path) -> Claims:
    """(what became of it, rollout, attempt) as metrics.jsonl has it. Each was journalled before it was told there.

    To be read before the journal: a living driver goes on writing both.
    """
    found: Claims = {}
    path = run / "metrics.jsonl"
    for event in read_metrics(path) if path.is_file() else ():
        attempt = event.data.get("attempt")
        if (claim := _CLAIMS.get(event.kind)) is not None and isinstance(attempt, int):
            found[claim, event.subject, attempt] = None
    return found


def contradicted(claims: Claims, attempts: dict[str, list[Attempt]]) -> list[str]:
    """What metrics.jsonl tells and the journal does not: its records are gone."""
    journalled: set[tuple[str, str, int]] = set()
    for rollout, mine in attempts.items():
        for attempt in mine:
            number = attempt.start.attempt
            journalled.add(("started", rollout, number))
            if attempt.finished is not None:
                journalled.add(("finished", rollout, number))
            if attempt.acknowledged:
                journalled.add(("delivered", rollout, number))
    gone = [claim for claim in claims if claim not in journalled]
    if not gone:
        return []
    what, rollout, attempt = gone[0]
    return [
        f"records are gone from the journal: metrics.jsonl tells {len(gone)} things of rollouts that it does not hold, "
        f"the first that {rollout}, attempt {attempt}, was {what}"
    ]
