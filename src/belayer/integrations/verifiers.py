"""verifiers: rollouts whose tool calls act in a protected sandbox (written against verifiers 0.4).

    agent = protected_agent(AgentConfig(model="…", client=EvalClientConfig(base_url="http://127.0.0.1:8000/v1")))
    async with agent, protected_box() as box:
        trace = await agent.run(task, runtime=box)

`base_url` may be the gateway of `belayer serve`. It parses no tool calls: say `tool_calls=False` then, and commands are
blocks of text. verifiers names every rollout in `X-Session-ID`, so each is a session there.

The box is a `Runtime`, so a task's `setup`, `finalize` and rewards act in it as in any other. verifiers' own harnesses
run a program in the box that calls the model over the network, which the box does not have: `SandboxBash` calls it from
this process, and offers the model one shell in the box. Its kinds of runtime are a closed list, so the box calls itself
"docker" on traces.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from belayer.errors import BelayerError
from belayer.integrations._bash_tool import BASH_TOOL, TEXT_INSTRUCTIONS, command_in
from belayer.integrations._extras import missing
from belayer.integrations._host import ProtectedHost, shared_host
from belayer.integrations._protected import ProtectedSandbox
from belayer.sandbox import ExecResult

try:
    from openai import AsyncOpenAI, OpenAIError
    from verifiers.v1.agent import Agent  # pyright: ignore[reportMissingImports]
    from verifiers.v1.configs.harness import HarnessConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
    from verifiers.v1.errors import SandboxError  # pyright: ignore[reportMissingImports]
    from verifiers.v1.harness import Harness  # pyright: ignore[reportMissingImports]
    from verifiers.v1.runtimes import (  # pyright: ignore[reportMissingImports]
        DockerConfig,
        DockerRuntimeInfo,
        ProgramResult,
        Runtime,
        register,
    )
except ImportError as error:
    raise missing("verifiers", "verifiers", error) from error

NO_LIMIT_S = 7 * 86400.0  # verifiers' own timeouts end the call; a sandbox wants a number


class BelayerRuntime(Runtime):
    """A box that outlives its sandboxes. What cannot be repaired is verifiers' `SandboxError`, and ends the rollout."""

    supports_user: ClassVar[bool] = True
    is_local: bool = True

    def __init__(self, *, image: str | None = None, name: str | None = None, host: ProtectedHost | None = None) -> None:
        super().__init__(name)
        self.config = DockerConfig(image=image or "base", allow=[])
        self.info = DockerRuntimeInfo(**self.config.model_dump())
        self.sandbox: ProtectedSandbox | None = None
        self._image, self._host = image, host

    async def start(self) -> None:
        with _typed():
            host = self._host or shared_host()
            self.sandbox = await host.sandbox(self.name, image=self._image, group="verifiers")
        self.info.id = self.sandbox.id

    async def teardown(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()

    def cleanup(self) -> None:
        if self.sandbox is not None:
            self.sandbox.blocking.close()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        with _typed():
            result = await self._box.exec(argv, env=self.process_env(env) or None, timeout_s=NO_LIMIT_S, user=self.user)
        return ProgramResult(
            exit_code=_code(result),
            stdout=result.stdout.decode(errors="replace"),
            stderr=result.stderr.decode(errors="replace"),
        )

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        started = await self.run(["sh", "-c", f"{shlex.join(argv)} </dev/null >{shlex.quote(log)} 2>&1 &"], env)
        if started.exit_code:
            raise SandboxError(f"{argv[0]} could not be started: {started.stderr}")

    async def bash(self, command: str, timeout_s: float) -> ExecResult:
        """One command in the box's persistent shell."""
        with _typed():
            return await self._box.shell(command, timeout_s=timeout_s)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None:
            return await super()._read(path, max_bytes)
        with _typed(path):
            return await self._box.read(path)

    async def write(self, path: str, data: bytes) -> None:
        with _typed(path):
            await self._box.write(path, data)

    async def expose(self, port: int) -> str:
        raise SandboxError("a protected sandbox has no network: its ports cannot be reached from outside")

    @property
    def _box(self) -> ProtectedSandbox:
        if self.sandbox is None:
            raise SandboxError(f"{self.name} is not started")
        return self.sandbox


class SandboxBash(Harness[HarnessConfig]):
    """A chat loop in this process with a shell in the box. Every model call goes through verifiers.

    With `tool_calls` the shell is the tool `bash`; without, the model writes commands as blocks of text.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    NEEDS_CONTAINER = False
    tool_calls = True

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        if not isinstance(runtime, BelayerRuntime):
            raise TypeError("this harness needs a protected box: agent.run(task, runtime=box)")
        system, prompt = self.resolve_prompt(data)
        if not self.tool_calls:
            system = "\n\n".join(part for part in (system, TEXT_INSTRUCTIONS) if part)
        offered: dict[str, Any] = {"tools": [BASH_TOOL]} if self.tool_calls else {}
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt:
            messages += [message_to_wire(message) for message in prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                except OpenAIError as error:  # also how verifiers ends a rollout that has reached a limit
                    return ProgramResult(exit_code=1, stdout="", stderr=str(error))
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if self.tool_calls:
                    for call in message.tool_calls or ():
                        said = await self._call(runtime, call)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
                elif (command := command_in(message.content or "")) is not None:
                    messages.append({"role": "user", "content": await self._run(runtime, command)})
                if messages[-1]["role"] == "assistant":
                    return ProgramResult(exit_code=0, stdout=message.content or "", stderr="")

    async def _call(self, runtime: BelayerRuntime, call: Any) -> str:
        try:
            command = json.loads(call.function.arguments)["command"]
        except (ValueError, KeyError, TypeError):
            return 'error: bash takes {"command": "…"}'
        if call.function.name != "bash" or not isinstance(command, str):
            return f"error: there is one tool, bash, and not {call.function.name}"
        return await self._run(runtime, command)

    async def _run(self, runtime: BelayerRuntime, command: str) -> str:
        result = await runtime.bash(command, self.config.tool_timeout)
        if result.exit_code == 0:
            return result.text
        return f"{result.text}\n[{'timeout' if result.timed_out else f'exit code {_code(result)}'}]"


def protected_agent(config: Any, *, tool_calls: bool = True, **options: Any) -> Any:
    """verifiers' `Agent` with the harness `SandboxBash`; give its `run` a box.

    `tool_calls=False` for servers that parse none: the model writes commands as blocks of text.
    """
    agent = Agent(config, **options)
    agent.harness = SandboxBash(HarnessConfig(id="bash", **_kept(config.harness)))
    agent.harness.tool_calls = tool_calls
    return agent


@asynccontextmanager
async def protected_box(
    *, image: str | None = None, name: str | None = None, host: ProtectedHost | None = None
) -> AsyncIterator[BelayerRuntime]:
    """A started box, removed in the end. `host`: default the process's shared one."""
    box = BelayerRuntime(image=image, name=name, host=host)
    register(box)
    try:
        await box.start()
        yield box
    finally:
        await box.stop()


def _kept(harness: Any) -> dict[str, Any]:
    return {} if harness is None else {"env": harness.env, "tool_timeout": harness.tool_timeout}


def _code(result: ExecResult) -> int:
    return result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)


class _typed:
    """Makes an error of ours one that verifiers knows as the sandbox's."""

    def __init__(self, path: str = "") -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BelayerError):
            raise SandboxError(str(error)) from error
        if isinstance(error, OSError) and self._path:
            raise SandboxError(f"{self._path}: {error}") from error
