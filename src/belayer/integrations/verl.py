"""verl: its tool agent loop with a protected sandbox (written against verl 0.9).

    # agents.yaml, named by actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: belayer_sandbox
      _target_: belayer.integrations.verl.SandboxAgentLoop

and a column `agent_name` with the value `belayer_sandbox` in the data.

Each sample acts in one protected sandbox, through the tool `bash`. verl
makes a message for the model of every exception in a tool: what ends an environment is raised again after it, and ends
the sample. Derive from the class for `prepare` and `reward`.

Generation by Belayer's engine is the other half: `belayer.integrations.verl_rollout`. Each works without the other.
"""

from __future__ import annotations

from typing import Any

from belayer.errors import BelayerError
from belayer.integrations._bash_tool import BASH_TOOL
from belayer.integrations._extras import missing
from belayer.integrations._host import shared_host
from belayer.integrations._protected import ProtectedSandbox

try:
    from verl.experimental.agent_loop.agent_loop import register  # pyright: ignore[reportMissingImports]
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop  # pyright: ignore[reportMissingImports]
    from verl.tools.function_tool import FunctionTool  # pyright: ignore[reportMissingImports]
    from verl.tools.schemas import OpenAIFunctionToolSchema  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise missing("verl", "verl", error) from error


@register("belayer_sandbox")
class SandboxAgentLoop(ToolAgentLoop):
    """One sample's loop. `image` and `timeout_s` may stand in the agents' YAML."""

    def __init__(self, *args: Any, image: str | None = None, timeout_s: float = 60.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        schema = OpenAIFunctionToolSchema.model_validate(BASH_TOOL)
        self.tools["bash"] = FunctionTool(name="bash", fn=self._bash, tool_schema=schema, is_async=True)
        self.tool_schemas.append(schema.model_dump(exclude_unset=True, exclude_none=True))
        self.sandbox: ProtectedSandbox | None = None
        self._image, self._timeout_s = image, timeout_s
        self._lost: BelayerError | None = None

    async def run(self, sampling_params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As verl's, with a sandbox around it. Raises `BelayerError` where the environment cannot be kept."""
        self.sandbox = await shared_host().sandbox("verl", image=self._image, group="verl")
        score = None
        try:
            await self.prepare(self.sandbox, kwargs)
            output = await super().run(sampling_params, *args, **kwargs)
            score = await self.reward(self.sandbox, kwargs)
            if score is not None:
                output.reward_score = score
            return output
        finally:
            await self.sandbox.close(score)

    async def prepare(self, sandbox: ProtectedSandbox, row: dict[str, Any]) -> None:
        """What the sample's sandbox needs first; `row` has the data set's columns. Does nothing unless overridden."""

    async def reward(self, sandbox: ProtectedSandbox, row: dict[str, Any]) -> float | None:
        """The sample's reward, from its sandbox; None leaves it to verl's reward functions."""
        return None

    async def _bash(self, command: str) -> str:
        assert self.sandbox is not None
        try:
            result = await self.sandbox.shell(command, timeout_s=self._timeout_s)
        except BelayerError as error:
            self._lost = self._lost or error
            raise
        if result.exit_code == 0:
            return result.text
        return f"{result.text}\n[{'timeout' if result.timed_out else f'exit code {result.exit_code}'}]"

    async def _call_tool(self, *args: Any, **kwargs: Any) -> Any:
        answer = await super()._call_tool(*args, **kwargs)
        if self._lost is not None:
            raise self._lost
        return answer
