"""Turns as a run of `belayer train` recorded them: the real bubbles and the real times of its commands."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from belayer import events
from belayer.errors import RunError

from ._policy_sim import Turn, World


def recorded_turns(run: Path, world: World) -> Callable[[random.Random], list[Turn]]:
    """A source of rollouts: each is one of the run's, drawn at random. Sizes are drawn as `world` says.

    Actions between two turns of the model are one tool call here. Raises `RunError` when the run recorded none.
    """
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise RunError(f"{run} has no metrics.jsonl", next_step="give the folder of a run of `belayer train`")
    rollouts: dict[str, list[list[float]]] = defaultdict(list)
    with open(file) as lines:
        for line in lines:
            event = json.loads(line)
            if event["kind"] == events.GENERATE:
                rollouts[event["subject"]].append([event["data"]["wall_s"], 0.0])
            elif event["kind"] == events.EXEC and rollouts[event["subject"]]:
                rollouts[event["subject"]][-1][1] += event["data"]["wall_s"]
    usable = [turns for turns in rollouts.values() if turns]
    if not usable:
        raise RunError(f"{run} recorded no turn of a model", next_step="give a run in which a model took turns")

    def draw(rng: random.Random) -> list[Turn]:
        least, each = world.tool_bytes
        return [
            Turn(bubble, tool, least + each * tool, world.memory[0] * rng.lognormvariate(0.0, world.memory[1]))
            for bubble, tool in rng.choice(usable)
        ]

    return draw
