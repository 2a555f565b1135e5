"""verl's tool agent loop with `SandboxAgentLoop`, in verl's Python: what test_adapter_verl.py runs.

python tests/contract/adapter_verl_agent.py kept|diverges

The loop, its parser, its configuration and its tools are verl's. The model is a script: what it says is fixed, and it
comes as token ids through verl's own output type.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from omegaconf import OmegaConf
from tests.engine_kit import byte_tokenizer
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from belayer.integrations.verl import SandboxAgentLoop

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
COMMANDS = {
    "kept": ["echo a >> /task/log; touch /task/begun-verl; sleep 1", "cat /task/log", "(exit 3)"],
    "diverges": ["cat /proc/sys/kernel/random/uuid", "echo on"],
}


class Script:
    """In the place of verl's LLMServerClient."""

    def __init__(self, tokenizer: Any, commands: list[str], before: Any = None) -> None:
        calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands]
        self.texts = [*(f"<tool_call>{call}</tool_call>" for call in calls), "done"]
        self.tokenizer = tokenizer
        self.before = before
        self.turn = 0
        self.prompts: list[str] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        ids = self.tokenizer.encode(self.texts[self.turn], add_special_tokens=False)
        if self.before is not None:
            self.before(self.turn)
        self.turn += 1
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed")


class Loop(SandboxAgentLoop):
    async def prepare(self, sandbox: Any, row: dict[str, Any]) -> None:
        await sandbox.shell(f"mkdir -p /task; echo {row['name']} > /task/name")

    async def reward(self, sandbox: Any, row: dict[str, Any]) -> float | None:
        return float(await sandbox.read("/task/log") == b"a\n")


async def main(what: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(1000), chat_template=TEMPLATE)
    rollout = RolloutConfig(name="belayer", prompt_length=2000, response_length=2000, tensor_model_parallel_size=1)
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": "none"}}})
    OmegaConf.update(config, "actor_rollout_ref.rollout", OmegaConf.structured(rollout))
    loop: Any = None

    def strike(turn: int) -> None:
        if what == "diverges" and turn == 1:
            os.kill(loop.sandbox.current.init_pid, signal.SIGKILL)

    model = Script(tokenizer, COMMANDS[what], strike)
    data = OmegaConf.create({"continuous_token": {"enable": False}})
    loop = Loop(
        trainer_config=DictConfigWrap(config),
        server_manager=model,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap(data),
        timeout_s=30.0,
    )
    try:
        output = await loop.run({}, raw_prompt=[{"role": "user", "content": "go"}], name="row-1")
    except Exception as error:
        print("ended by", type(error).__name__, "after turn", model.turn)
        return
    print("reward", output.reward_score, "turns", output.num_turns)
    print("seen", json.dumps(model.prompts[-1]))
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert 0 < sum(output.response_mask) < len(output.response_mask)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
