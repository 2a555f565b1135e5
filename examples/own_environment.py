"""The quick start's example: an environment of your own, any model folder. Run it as root with `.venv/bin/python`."""

import asyncio
import logging

from transformers import AutoTokenizer

from belayer import Run, load_config

MODEL = "runs/tiny_model"  # a Hugging Face folder: config.json, *.safetensors, tokenizer.json


async def solve(rollout):
    await rollout.sandbox.write("/tmp/secret", rollout.task)
    await rollout.observe("read the file /tmp/secret\n$ ")
    for _ in range(3):
        turn = await rollout.generate(max_tokens=16)
        result = await rollout.sandbox.shell(turn.text, timeout_s=5)  # whatever it says: an exit code is a result
        await rollout.observe(result.text[:40] + "\n$ ")
    return float(rollout.task in result.text)


async def main():
    logging.basicConfig(level=logging.INFO)  # what the start is about; recoveries are seen without it
    config = load_config(overrides={"engine.model": MODEL, "engine.max_model_len": 256})
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    async with await Run.open("runs/mine", config, tokenizer=tokenizer) as run:
        async for trajectory in run.rollouts(solve, ["red", "blue"], group_size=2):
            print(trajectory.rollout_id, trajectory.reward, trajectory.turns, "turns")
            run.acknowledge(trajectory)


asyncio.run(main())
