"""SWE-ReX: a deployment whose runtime is a protected sandbox (written against SWE-ReX 1.4), for SWE-agent and others.

    deployment = BelayerDeployment(image="base")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="make test", timeout=60))

There is one session at a time: it is the sandbox's persistent shell, which a checkpoint holds with its directory,
variables and jobs. Interactive programs (`is_interactive_command`, `expect`) need a terminal and are refused.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from belayer.integrations._extras import missing
from belayer.integrations._host import ProtectedHost, shared_host
from belayer.integrations._protected import ProtectedSandbox
from belayer.sandbox import ExecResult

try:
    from swerex.deployment.abstract import AbstractDeployment  # pyright: ignore[reportMissingImports]
    from swerex.deployment.hooks.abstract import CombinedDeploymentHook  # pyright: ignore[reportMissingImports]
    from swerex.exceptions import (  # pyright: ignore[reportMissingImports]
        CommandTimeoutError,
        DeploymentNotStartedError,
        NonZeroExitCodeError,
        SessionDoesNotExistError,
        SessionExistsError,
    )
    from swerex.runtime.abstract import (  # pyright: ignore[reportMissingImports]
        AbstractRuntime,
        BashInterruptAction,
        BashObservation,
        CloseBashSessionResponse,
        CloseResponse,
        CommandResponse,
        CreateBashSessionResponse,
        IsAliveResponse,
        ReadFileResponse,
        UploadResponse,
        WriteFileResponse,
    )
except ImportError as error:
    raise missing("SWE-ReX", "swe-rex", error) from error


class BelayerRuntime(AbstractRuntime):
    """A runtime on one protected sandbox. What is infrastructure is repaired or raised as `BelayerError`."""

    def __init__(self, sandbox: ProtectedSandbox, *, logger: logging.Logger | None = None) -> None:
        self.sandbox = sandbox
        self.logger = logger or logging.getLogger("belayer")
        self._session = ""

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        broken = self.sandbox.broken
        return IsAliveResponse(is_alive=broken is None, message=str(broken or ""))

    async def create_session(self, request: Any) -> CreateBashSessionResponse:
        if self._session == request.session:
            raise SessionExistsError(f"session {request.session} already exists")
        if self._session:
            raise NotImplementedError(f"one session at a time: close {self._session!r} before {request.session!r}")
        said = ""
        for path in request.startup_source:
            said += (await self.sandbox.shell(f"source {path}", timeout_s=max(request.startup_timeout, 10.0))).text
        self._session = request.session
        return CreateBashSessionResponse(output=said)

    async def run_in_session(self, action: Any) -> BashObservation:
        self._check_session(action.session)
        if isinstance(action, BashInterruptAction):
            return BashObservation(exit_code=0)  # a command that timed out has been interrupted already
        if action.is_interactive_command or action.is_interactive_quit or action.expect:
            raise NotImplementedError("interactive programs need a terminal, which a protected sandbox does not give")
        result = await self.sandbox.shell(action.command, timeout_s=action.timeout)
        if result.timed_out:
            raise CommandTimeoutError(f"timeout after {action.timeout} seconds while running {action.command!r}")
        if action.check == "raise" and result.exit_code != 0:
            raise NonZeroExitCodeError(_failed(action, result))
        return BashObservation(output=result.text, exit_code=None if action.check == "ignore" else result.exit_code)

    async def close_session(self, request: Any) -> CloseBashSessionResponse:
        self._check_session(request.session)
        await self.sandbox.shell("exit 0")  # the next session gets a fresh shell
        self._session = ""
        return CloseBashSessionResponse()

    async def execute(self, command: Any) -> CommandResponse:
        form = command.command
        if isinstance(form, str) and not command.shell:
            form = [form]
        if command.merge_output_streams:
            form = ["bash", "-c", f"exec 2>&1\n{form}"] if isinstance(form, str) else ["sh", "-c", _MERGED, *form]
        result = await self.sandbox.exec(form, timeout_s=command.timeout, cwd=command.cwd, env=command.env)
        if result.timed_out:
            raise CommandTimeoutError(f"timeout after {command.timeout} seconds while running {command.command!r}")
        if command.check and result.exit_code != 0:
            raise NonZeroExitCodeError(_failed(command, result))
        return CommandResponse(
            stdout=result.stdout.decode(errors="backslashreplace"),
            stderr=result.stderr.decode(errors="backslashreplace"),
            exit_code=result.exit_code if result.exit_code is not None else -(result.signal or 0),
        )

    async def read_file(self, request: Any) -> ReadFileResponse:
        data = await self.sandbox.read(request.path)
        return ReadFileResponse(content=data.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: Any) -> WriteFileResponse:
        await self.sandbox.write(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: Any) -> UploadResponse:
        await self.sandbox.upload(Path(request.source_path), request.target_path)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        await self.sandbox.close()
        return CloseResponse()

    def _check_session(self, session: str) -> None:
        if not self._session or session != self._session:
            raise SessionDoesNotExistError(f"session {session!r} does not exist")


class BelayerDeployment(AbstractDeployment):
    """Starts and stops a protected sandbox. `host` is for programs; otherwise the process's shared one is used."""

    def __init__(
        self,
        *,
        image: str | None = None,
        name: str = "swe-rex",
        host: ProtectedHost | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.logger = logger or logging.getLogger("belayer")
        self._image, self._name, self._host = image, name, host
        self._hooks = CombinedDeploymentHook()
        self._runtime: BelayerRuntime | None = None

    def add_hook(self, hook: Any) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        if self._runtime is None:
            return IsAliveResponse(is_alive=False, message="not started")
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        self._hooks.on_custom_step("Starting a protected sandbox")
        host = self._host or shared_host()
        self._runtime = BelayerRuntime(
            await host.sandbox(self._name, image=self._image, group="swe-rex"), logger=self.logger
        )

    async def stop(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.close()

    @property
    def runtime(self) -> BelayerRuntime:
        if self._runtime is None:
            raise DeploymentNotStartedError()
        return self._runtime


_MERGED = 'exec "$0" "$@" 2>&1'


def _failed(command: Any, result: ExecResult) -> str:
    text = f"command {command.command!r} failed with exit code {result.exit_code}: {result.text!r}"
    return f"{command.error_msg}: {text}" if command.error_msg else text
