"""verifiers in front of the gateway: its rollout is the same, token for token, whether the worker dies in it or not."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import needs_sandboxes, needs_vllm
from tests.contract.adapter_kit import ROOT, harness_python
from tests.gateway_kit import Served
from tests.taught_model import teach_text

from belayer.integrations._bash_tool import TEXT_INSTRUCTIONS
from belayer.verify import verify_run

pytestmark = [pytest.mark.contract, needs_sandboxes, needs_vllm]

PROMPT = "Write the sum of the numbers in /task/numbers to /task/sum."
PROGRAM = f"""
import asyncio, json, sys
import verifiers.v1 as vf
from belayer.integrations.verifiers import protected_agent, protected_box


class AddTask(vf.Task):
    async def setup(self, trace, runtime):
        await runtime.write("/task/numbers", b"19\\n23\\n")

    @vf.reward
    async def right(self, runtime):
        return float((await runtime.read("/task/sum")).strip() == b"42")


async def main(url):
    client = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    sampling = vf.SamplingConfig(temperature=0.8, max_tokens=150, seed=5)
    config = vf.AgentConfig(
        model="tiny", client=client, sampling=sampling, runtime={{"type": "subprocess"}}, network_notice=False
    )
    async with protected_agent(config, tool_calls=False) as agent:
        for line in sys.stdin:
            async with protected_box() as box:
                trace = await agent.run(AddTask(vf.TaskData(idx=0, prompt={PROMPT!r})), runtime=box)
            said = [node.message.model_dump(mode="json") for node in trace.nodes]
            told = {{"id": trace.id, "errors": [str(e) for e in trace.errors], "reward": trace.reward, "said": said}}
            print(json.dumps(told), flush=True)


asyncio.run(main(sys.argv[1]))
"""


def conversation(begin: str) -> list[dict[str, str]]:
    says = [
        ("system", TEXT_INSTRUCTIONS),
        ("user", PROMPT),
        ("assistant", f"{begin}\n```bash\ncd /task && cat numbers\n```"),
        ("user", "19\n23\n"),
        ("assistant", "Now I add them up.\n```bash\nexpr 19 + 23 > sum; cat sum\n```"),
        ("user", "42\n"),
        ("assistant", "The sum is in the file."),
    ]
    return [{"role": role, "content": content} for role, content in says]


def strike_in_turn(served: Served, http: httpx.Client, turn: int) -> int:
    """SIGKILL the worker while the only open session is in the middle of its `turn`; returns the tokens that it had."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for session in http.get("/sessions", params={"state": "open"}).json()["sessions"]:
            about = http.get(f"/sessions/{session['id']}").json()
            turns = [each for trajectory in about["trajectories"] for each in trajectory["turns"]]
            if len(turns) == turn and turns[-1]["finish_reason"] is None and turns[-1]["completion_tokens"] > 3:
                served.kill_worker()
                return turns[-1]["completion_tokens"]
        time.sleep(0.002)
    raise AssertionError("the turn that was to be struck never came")


def test_a_rollout_is_the_same_when_the_worker_dies_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    python = harness_python("verifiers", "verifiers")
    served = Served(tmp_path / "gateway")
    teach_text(served.model, [conversation(begin) for begin in ("I look at them.", "Let me see them first.")])
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENAI_API_KEY": "none", "XDG_CONFIG_HOME": str(tmp_path)}
    with served, httpx.Client(base_url=served.url, timeout=60, trust_env=False) as http:
        program = subprocess.Popen(
            [python, "-c", PROGRAM, f"{served.url}/v1"],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            calm = rollout(program, http)
            served.wait_standby()
            dead = served.upstream.engine.worker_pid
            struck = rollout(program, http, lambda: strike_in_turn(served, http, 2))
            assert served.upstream.engine.worker_pid != dead, "no worker died: this test has shown nothing"
        finally:
            program.kill()
            program.communicate()
    assert calm["errors"] == struck["errors"] == [] and calm["reward"] == struck["reward"] == 1.0, calm
    assert [message["role"] for message in calm["said"]].count("assistant") == 3
    assert struck["said"] == calm["said"]
    (undisturbed,), (disturbed,) = calm["trajectories"], struck["trajectories"]
    assert 0 < struck["struck_after"] < disturbed["turns"][1]["completion_tokens"]
    for what in ("token_ids", "loss_mask", "logprobs", "weights_versions"):
        assert disturbed[what] == undisturbed[what], what
    verdict = verify_run(served.run)
    assert verdict.consistent, verdict.findings


def rollout(program: subprocess.Popen[str], http: httpx.Client, meanwhile: Any = None) -> dict[str, Any]:
    """One rollout by verifiers, and what the gateway has of it."""
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write("go\n")
    program.stdin.flush()
    struck = meanwhile() if meanwhile is not None else 0
    line = program.stdout.readline()
    assert line, "verifiers ended"
    told = json.loads(line)
    where = f"/sessions/{told['id']}"
    told["trajectories"] = http.post(f"{where}/finish", json={"reward": told["reward"]}).json()["trajectories"]
    return told | {"struck_after": struck}
