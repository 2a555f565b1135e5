"""Where a context ends when the environment could not be brought back as far as the context describes."""

from __future__ import annotations

from belayer.journal import Call


def cut_before_action(calls: list[Call], start: int, k: int) -> int:
    """Where the context must end so that nothing in it knows of action `k`: the model turn that asked for it.

    `start` is the number of calls through action k-1. Observations between the two stay; the first model turn after
    them goes, because it chose the action. An action that no model turn precedes is cut itself.
    """
    for number in range(start, len(calls)):
        call = calls[number]
        if call.kind == "generate" or (call.kind == "action" and call.k == k):
            return number
    return len(calls)
