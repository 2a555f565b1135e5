"""The README's example: protected rollouts of a function of one's own. Run it with `.venv/bin/python`, as root."""

import asyncio
from pathlib import Path

from belayer import Config, Run
from shell_task import CharTokenizer
from tiny_model import build  # a tiny untrained model; any model folder of yours will do


async def solve(rollout):
    await rollout.sandbox.shell(f"cd /tmp && echo {rollout.task} > note")
    await rollout.observe("$ ")
    turn = await rollout.generate(max_tokens=12)
    result = await rollout.sandbox.shell("cat note")  # the shell is still in /tmp, whatever died in between
    await rollout.observe(result.text)
    return float(result.text.strip() == rollout.task and len(turn.token_ids) == 12)


async def main():
    if not Path("runs/tiny_model").exists():
        build(Path("runs/tiny_model"), seed=0)
    config = Config(engine={"model": "runs/tiny_model", "max_model_len": 128})
    async with await Run.open("runs/first", config, tokenizer=CharTokenizer()) as run:
        async for trajectory in run.rollouts(solve, ["red", "blue"], group_size=2):
            print(trajectory.rollout_id, "reward", trajectory.reward, "tokens", len(trajectory.token_ids))
            run.acknowledge(trajectory)  # never delivered again, not even after a crash


asyncio.run(main())
