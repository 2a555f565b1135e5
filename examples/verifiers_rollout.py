"""A verifiers rollout in a protected sandbox; give it the URL of any OpenAI-compatible server and a model's name."""

import asyncio
import sys

import verifiers.v1 as vf

from belayer.integrations.verifiers import protected_agent, protected_box


class AddTask(vf.Task):
    async def setup(self, trace, runtime):
        await runtime.write("/task/numbers", b"19\n23\n")

    @vf.reward
    async def right(self, runtime):
        return float((await runtime.read("/task/sum")).strip() == b"42")


async def main(url, model):
    task = AddTask(vf.TaskData(idx=0, prompt="Write the sum of the numbers in /task/numbers to /task/sum."))
    client = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    agent = protected_agent(vf.AgentConfig(model=model, client=client, runtime={"type": "subprocess"}))
    async with agent, protected_box() as box:
        trace = await agent.run(task, runtime=box)
    print("errors", [error.type for error in trace.errors], "reward", trace.reward)


asyncio.run(main(*sys.argv[1:]))
