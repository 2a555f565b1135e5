"""Rollouts of turns with the published lengths, scaled down; one function runs them with Belayer or without.

A turn of the model lasts LogN(1.74, 1.10) s, a tool call LogN(-1.2, 2.85) s up to the command's timeout; both are
multiplied with `scale`, so that a bench ends in minutes. Draws are stratified: a batch of n turns holds the quantiles
(i + 1/2) / n of each distribution, shuffled, so that small batches have the right shape too and no two differ in it.

A tool call is a real command in the rollout's persistent shell: it changes a shell variable, writes a fresh file,
appends to a log, and waits (in a `sleep`) for the rest of its length. A background process holds memory all the while.
At the end the reward looks at all of it: lost state is lost reward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Sequence
from statistics import NormalDist
from typing import Any, Protocol

import msgspec

from belayer.engine import GenerationRequest, Sampling, TokenChunk
from belayer.sandbox import Sandbox

TURN = (1.74, 1.10)
TOOL = (-1.2, 2.85)
TOOL_LIMIT_S = 30.0
HELD_BYTES = 48 << 20  # of the background process
WRITTEN = (64 << 10, 1 << 20)  # bytes of a tool call: at least, and more for each unscaled second
WRITTEN_LIMIT = 8 << 20
PROMPT = 32
RIGHT = 0.5  # reward for the right state; the rest depends on what was said


class Shape(msgspec.Struct, frozen=True):
    """What a batch looks like: `turns` of each rollout, shortest and longest; `slots` at a time."""

    rollouts: int
    slots: int
    turns: tuple[int, int]
    scale: float


def lengths(count: int, distribution: tuple[float, float], rng: random.Random, limit: float) -> list[float]:
    """`count` stratified draws in seconds, unscaled, in random order."""
    normal = NormalDist(*distribution)
    found = [min(limit, math.exp(normal.inv_cdf((index + 0.5) / count))) for index in range(count)]
    rng.shuffle(found)
    return found


def tasks(shape: Shape, tokens_per_s: float, seed: int) -> list[dict[str, Any]]:
    """The batch: each task has steps of (tokens, seconds of the tool call, bytes that it writes)."""
    rng = random.Random(f"turns {seed}")
    low, high = shape.turns
    counts = [low + index * (high - low + 1) // shape.rollouts for index in range(shape.rollouts)]
    rng.shuffle(counts)
    total = sum(counts)
    turns = iter(lengths(total, TURN, rng, float("inf")))
    tools = iter(lengths(total, TOOL, rng, TOOL_LIMIT_S))
    made = []
    for number, count in enumerate(counts):
        steps = []
        for _ in range(count):
            turn_s, tool_s = next(turns), next(tools)
            nbytes = min(WRITTEN_LIMIT, WRITTEN[0] + round(WRITTEN[1] * tool_s))
            steps.append([max(1, round(turn_s * shape.scale * tokens_per_s)), round(tool_s * shape.scale, 4), nbytes])
        made.append({"number": number, "steps": steps})
    return made


class AnyRollout(Protocol):
    """What the function below needs of a rollout, protected or not."""

    task: Any

    @property
    def sandbox(self) -> Any: ...

    def observe(self, tokens: Sequence[int]) -> Awaitable[Any]: ...

    def generate(self, *, max_tokens: int, temperature: float) -> Awaitable[Any]: ...


async def solve(rollout: AnyRollout) -> float:
    """Run a task; the reward is `RIGHT` for the right state at the end, and up to 0.5 by the tokens."""
    task, shell = rollout.task, rollout.sandbox.shell
    await shell(_begin(HELD_BYTES))
    await rollout.observe([(7 * position + task["number"]) % 251 for position in range(PROMPT)])
    said, total, written = 0, 0, 0
    for number, (tokens, tool_s, nbytes) in enumerate(task["steps"], start=1):
        turn = await rollout.generate(max_tokens=tokens, temperature=1.0)
        said += sum(turn.token_ids)
        total, written = total + number, written + nbytes
        result = await shell(_step(number, tool_s, nbytes))
        await rollout.observe(list(result.stdout))
    end = await shell('kill -0 $job && echo "$total $(wc -l < log) $(cat f* | wc -c)"')
    right = end.stdout.decode(errors="replace").strip() == f"{total} {len(task['steps'])} {written}"
    return RIGHT * right + (said % 101) / 202


def _begin(held: int) -> str:
    program = f"import time; held = bytearray(b'x') * {held}; time.sleep(3600)"
    return (
        f'mkdir -p /tmp/w && cd /tmp/w && total=0 && {{ python3 -c "{program}" </dev/null >/dev/null 2>&1 & job=$!; }}'
    )


def _step(number: int, wait_s: float, nbytes: int) -> str:
    return (
        f"total=$((total + {number})); head -c {nbytes} /dev/zero > f{number}; echo {number} >> log; "
        f'sleep {wait_s:.4f}; echo "$total $(wc -l < log)"'
    )


class Answers(Protocol):
    """The part of an engine that rollouts use."""

    async def generate(self, request: GenerationRequest, on_tokens: Any) -> str: ...

    async def end_trajectory(self, name: str) -> None: ...


class Said(msgspec.Struct, frozen=True):
    token_ids: list[int]


class Unprotected:
    """A rollout as a program without Belayer has it: an engine, a sandbox, the context in a list. Nothing else."""

    def __init__(self, name: str, task: Any, seeds: Sequence[int], engine: Answers, sandbox: Sandbox) -> None:
        self.task = task
        self.sandbox = sandbox
        self.context: list[int] = []
        self._name, self._seeds, self._engine = name, iter(seeds), engine
        self._turns = 0

    async def observe(self, tokens: Sequence[int]) -> None:
        self.context += tokens

    async def generate(self, *, max_tokens: int, temperature: float) -> Said:
        made: list[int] = []

        def keep(chunk: TokenChunk) -> None:
            made.extend(chunk.token_ids)

        self._turns += 1
        request = GenerationRequest(
            id=f"{self._name}.{self._turns}",
            prompt_ids=list(self.context),
            sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=next(self._seeds)),
            trajectory=self._name,
        )
        await self._engine.generate(request, keep)
        self.context += made
        return Said(made)
