"""What the rollouts of the joint campaign do: short conversations whose every command depends on all before it.

The model's tokens choose commands for a shell with state (variables, working directory, files, a background job). Most
tasks are reproducible: their trajectories under faults must be those of the undisturbed run, token for token. One in
four is not: a command prints random digits, so that a replay may observe something else and the context is cut. Those
are compared as distributions.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec

from belayer import Rollout

VOCABULARY = 1000
MOST_TURNS = 6
FICKLE = 4  # one task in so many is not reproducible
HEAVY = 3  # one in so many has a shell of some megabytes, so that images have to make room for others
COMMAND_TIMEOUT_S = 25.0  # a command takes milliseconds; a frozen sandbox is noticed after so long

_COMMANDS = (
    "n=$((n * 31 + {a})); echo $n",
    "mkdir -p d{b} && cd d{b} && pwd",
    "echo {a} >> log; cat log | md5sum | cut -c1-8",
    "sleep 0.0{b}; echo $n $? | md5sum | cut -c1-6",
    "for i in 1 2 3; do n=$((n + i * {a})); done; echo $n > f{b}; ls | sort | tr '\\n' ' '",
    "f() {{ echo $(( $1 + n )); }}; f {a}",
    "cd ..; pwd; false",
    "ls /usr/bin | wc -l; echo {a} > /tmp/t{b}",
    "cat /tmp/t{b} 2>/dev/null || echo none",
)
_FICKLE = "r=$(od -An -N1 -tu1 /dev/urandom); r=$((r % 10)); n=$((n * 7 + r)); echo $r"
_HEAVY = "printf -v heavy %4000000s x; echo ${#heavy}"


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """The tasks of every round: a pure function of its arguments."""
    rng = random.Random(f"joint tasks {seed}")
    return [
        {"start": rng.randrange(1000), "fickle": number % FICKLE == FICKLE - 1, "heavy": number % HEAVY == 0}
        for number in range(count)
    ]


def described() -> str:
    """Everything about the rollouts that decides what they come to, besides the model."""
    return repr((MOST_TURNS, FICKLE, HEAVY, _COMMANDS, _FICKLE, _HEAVY))


class Outcome(msgspec.Struct, frozen=True):
    """What is compared of one trajectory."""

    rollout: str
    attempt: int
    reward: float
    tokens: int
    turns: int
    digest: str
    fickle: bool


def digest(ids: list[int], mask: list[int], logprobs: list[float]) -> str:
    return hashlib.blake2b(repr((ids, mask, logprobs)).encode(), digest_size=12).hexdigest()


async def solve(rollout: Rollout) -> float:
    """One rollout. The reward is 0 to 1, and a function of everything that the environment has gone through."""
    sandbox, fickle = rollout.sandbox, rollout.task["fickle"]
    await rollout.observe([1 + rollout.task["start"] % 100, 7, rollout.seed % 900, 5])
    await sandbox.shell(f"mkdir -p /w && cd /w && n={rollout.task['start']}; sleep 3000 &", timeout_s=COMMAND_TIMEOUT_S)
    if rollout.task["heavy"]:
        await sandbox.shell(_HEAVY, timeout_s=COMMAND_TIMEOUT_S)
    await sandbox.write("/w/seed", str(rollout.seed))
    length = 0
    for number in range(MOST_TURNS):
        turn = await rollout.generate(max_tokens=4 + rollout.random.randrange(8))
        chosen = sum(turn.token_ids)
        command = _COMMANDS[chosen % len(_COMMANDS)].format(a=turn.token_ids[0] % 97, b=1 + turn.token_ids[-1] % 4)
        if fickle and number % 2:
            command = _FICKLE
        seen = await sandbox.shell(command, timeout_s=COMMAND_TIMEOUT_S)
        length += len(seen.stdout)
        await rollout.observe(_tokens(seen.stdout, seen.exit_code))
        rollout.now()
        if chosen % 5 == 0:
            break
    jobs = await sandbox.shell("echo $n; jobs -r | wc -l; pwd", timeout_s=COMMAND_TIMEOUT_S)
    files = await sandbox.exec("cd /w && find . -type f | sort | xargs md5sum | md5sum", timeout_s=COMMAND_TIMEOUT_S)
    kept = await sandbox.read("/w/seed")
    if kept.decode() != str(rollout.seed):
        return -1.0
    last = jobs.text if fickle else jobs.text + files.text
    return (int(hashlib.blake2b(last.encode(), digest_size=2).hexdigest(), 16) % 1000) / 1000


def _tokens(output: bytes, code: int | None) -> list[int]:
    """Tokens of an observation: its bytes, and a token for the exit code."""
    return [100 + byte for byte in output[:24]] + [400 + (code or 0) % 256]
