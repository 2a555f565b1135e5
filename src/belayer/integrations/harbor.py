"""Harbor: its environment in a protected sandbox (written against Harbor 0.26, which needs Python 3.12).

In a job's configuration:

    environment:
      import_path: belayer.integrations.harbor:BelayerEnvironment
      kwargs: {image: base}

The image of the sandbox store is `image`, else the task's `docker_image`, else the FROM of its Dockerfile, whose COPY,
ENV, WORKDIR and RUN are then done in each sandbox. Sandboxes have no network: a task that asks for it is refused unless
`offline: true` says that it does without. One trial is one protected sandbox; all of a process share a host.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from belayer.errors import ImageError
from belayer.integrations import _dockerfile
from belayer.integrations._extras import missing
from belayer.integrations._host import shared_host
from belayer.integrations._protected import ProtectedSandbox

try:
    from harbor.environments.base import (  # pyright: ignore[reportMissingImports]
        BaseEnvironment,
        ExecResult,
        SandboxBuildFailedError,
    )
    from harbor.environments.capabilities import EnvironmentCapabilities  # pyright: ignore[reportMissingImports]
    from harbor.environments.definition import (  # pyright: ignore[reportMissingImports]
        require_agent_environment_definition,
    )
    from harbor.environments.options import EnvironmentOptions  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise missing("Harbor", "harbor", error) from error

NO_LIMIT_S = 7 * 86400.0  # Harbor's own timeouts end the call; a sandbox wants a number


class BelayerOptions(EnvironmentOptions):
    """The `kwargs` of the environment."""

    image: str | None = None
    offline: bool = False


class BelayerEnvironment(BaseEnvironment):
    """One trial's environment. Infrastructure faults are repaired unseen; what cannot be raises `BelayerError`.

    A command that Harbor cuts off, because its agent's time is over, is killed and keeps what it has done.
    """

    options_model = BelayerOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sandbox: ProtectedSandbox | None = None
        self._recipe: _dockerfile.Recipe | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "belayer"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        dockerfile = self.environment_dir / "Dockerfile"
        if self.options.image or self.task_env_config.docker_image:
            return
        require_agent_environment_definition(self.environment_dir)
        if not dockerfile.is_file():
            raise ValueError(f"{self.environment_dir}: Compose tasks need several containers, and there is one here")

    def _validate_network_policy_support(self) -> None:
        super()._validate_network_policy_support()
        if not self._network_disabled and not self.options.offline:
            raise ValueError(
                f"{self.environment_name}: the task may use the network, and Belayer's sandboxes have none. Set "
                "network_mode = 'no-network' in its task.toml, or the environment's kwarg offline = true"
            )

    async def start(self, force_build: bool) -> None:
        """Make the sandbox, and do what a Dockerfile asks for unless the image was named."""
        host = shared_host()
        wanted = self._effective_memory_mb
        if wanted and wanted << 20 > host.config.sandbox.memory_bytes:
            raise ValueError(
                f"{self.environment_name} asks for {wanted} MB, and a sandbox has "
                f"{host.config.sandbox.memory_bytes >> 20}: set BELAYER_SANDBOX__MEMORY_BYTES"
            )
        image, dockerfile = self.options.image or self.task_env_config.docker_image, self.environment_dir / "Dockerfile"
        if dockerfile.is_file() and not self.task_env_config.docker_image:
            try:
                self._recipe = _dockerfile.read(dockerfile)
            except ValueError as error:
                raise SandboxBuildFailedError(str(error)) from error
            image = image or self._recipe.base
        try:
            self.sandbox = await host.sandbox(
                self.session_id, image=image, group="harbor", task={"environment": self.environment_name}
            )
        except ImageError as error:
            raise SandboxBuildFailedError(
                f"{error}\n  next: `belayer image import`, or kwargs: {{image: …}}"
            ) from error
        if self._recipe is not None:
            await self._build(self._recipe)
        await self._upload_environment_dir_after_start()
        made = await self.ensure_dirs(self._mount_targets(writable_only=True))
        if made is not None and made.return_code:
            raise RuntimeError(f"the trial's folders could not be made: {made.stderr}")

    async def _build(self, recipe: _dockerfile.Recipe) -> None:
        for step in recipe.steps:
            if step.kind == "copy":
                await self._copy(step)
                continue
            done = await self._exec(step.command, step.cwd, recipe.env, None, "root")
            if done.return_code:
                raise SandboxBuildFailedError(
                    f"RUN {step.command!r} ended with {done.return_code}: {(done.stderr or done.stdout or '')[-2000:]}"
                    "\n  next: what needs a network has to be built elsewhere: `belayer image import`"
                )

    async def _copy(self, step: _dockerfile.Step) -> None:
        into = str(PurePosixPath(step.cwd) / step.target)
        for name in step.sources:
            source = (self.environment_dir / name.lstrip("/")).resolve()
            if not source.is_relative_to(self.environment_dir.resolve()) or not source.exists():
                raise SandboxBuildFailedError(f"COPY {name}: not in {self.environment_dir}")
            as_file = source.is_file() and not step.target.endswith(("/", ".")) and len(step.sources) == 1
            target = into if as_file or source.is_dir() else f"{into}/{source.name}"
            await self._box.upload(source, target)

    async def stop(self, delete: bool) -> None:
        """Remove the sandbox; with `delete` false too, since nothing of it could be used again."""
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        merged = {**(self._recipe.env if self._recipe else {}), **(self._merge_env(env) or {})}
        return await self._exec(command, cwd or self._workdir, merged, timeout_sec, self._resolve_user(user))

    async def _exec(
        self, command: str, cwd: str | None, env: dict[str, str], timeout_s: float | None, user: str | int | None
    ) -> ExecResult:
        result = await self._box.exec(command, cwd=cwd, env=env or None, timeout_s=timeout_s or NO_LIMIT_S, user=user)
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_s} seconds: {result.text[-2000:]}")
        code = result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)
        return ExecResult(
            stdout=result.stdout.decode(errors="replace"),
            stderr=result.stderr.decode(errors="replace"),
            return_code=code,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._box.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._box.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".belayer-") as folder:
            await self._box.download(source_path, Path(folder) / "file")
            os.replace(Path(folder) / "file", target)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        target = Path(target_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".belayer-") as folder:
            await self._box.download(source_dir, Path(folder) / "tree")
            shutil.copytree(Path(folder) / "tree", target, symlinks=True, dirs_exist_ok=True)

    @property
    def _workdir(self) -> str | None:
        return self.task_env_config.workdir or (self._recipe.workdir if self._recipe else None)

    @property
    def _box(self) -> ProtectedSandbox:
        if self.sandbox is None:
            raise RuntimeError("the environment is not started")
        return self.sandbox
