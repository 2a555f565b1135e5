"""mini-swe-agent: its environment in a protected sandbox (written against mini-swe-agent 2.4).

In the configuration, or on the command line:

    environment:
      environment_class: belayer.integrations.minisweagent.BelayerEnvironment
      image: base            # an image of the sandbox store; default: sandbox.image
      cwd: /root
      timeout: 60

Whatever the sandboxes do, a command's result is given to the agent once. When an environment cannot be kept consistent
with the agent's messages, the run ends with `ContextDiverged` (or another `BelayerError`) and not with an observation.
"""

from __future__ import annotations

import contextlib
import platform
from typing import Any

from pydantic import BaseModel

from belayer.integrations._extras import missing
from belayer.integrations._host import ProtectedHost, shared_host
from belayer.sandbox import ExecResult

try:
    from minisweagent.exceptions import Submitted  # pyright: ignore[reportMissingImports]
    from minisweagent.utils.serialize import recursive_merge  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise missing("mini-swe-agent", "mini-swe-agent", error) from error

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class BelayerEnvironmentConfig(BaseModel):
    image: str | None = None
    """An image of the sandbox store; None: the configured one."""
    cwd: str = "/root"
    """Working directory of commands."""
    env: dict[str, str] = {}
    timeout: float = 30.0
    """Seconds that a command may take."""
    interpreter: list[str] = ["bash", "-lc"]
    """What runs a command, which is added to it."""
    name: str = "mini-swe-agent"
    """What the environment is called in the journal."""


class BelayerEnvironment:
    """An `Environment` of mini-swe-agent. `host` is for programs; otherwise the process's shared one is used."""

    def __init__(self, *, host: ProtectedHost | None = None, config_class: type = BelayerEnvironmentConfig, **kwargs):
        self.config = config_class(**kwargs)
        self._host = host or shared_host()
        self.sandbox = self._host.block(
            self._host.sandbox(self.config.name, image=self.config.image, group="mini-swe-agent")
        )

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run `action["command"]`; output and error output come together. Raises `BelayerError`, `Submitted`."""
        limit = timeout or self.config.timeout
        command = [*self.config.interpreter, f"exec 2>&1\n{action.get('command', '')}"]
        result = self.sandbox.blocking.exec(
            command, cwd=cwd or self.config.cwd, env=self.config.env or None, timeout_s=limit
        )
        output = {"output": result.text, "returncode": _return_code(result), "exception_info": ""}
        if result.timed_out:
            output["exception_info"] = f"The command was killed after {limit:g} s"
            output["extra"] = {"exception_type": "TimeoutExpired", "exception": output["exception_info"]}
        lines = output["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMIT and output["returncode"] == 0:
            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        return output

    def get_template_vars(self, **kwargs) -> dict[str, Any]:
        system = platform.uname()._asdict() | {"node": "sandbox"}
        return recursive_merge(self.config.model_dump(), system, kwargs)

    def serialize(self) -> dict:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = {"environment": self.config.model_dump(mode="json"), "environment_type": kind}
        return {"info": {"config": config, "belayer": {"id": self.sandbox.id, "restores": self.sandbox.restores}}}

    def cleanup(self, reward: float | None = None) -> None:
        """Remove the sandbox."""
        self.sandbox.blocking.close(reward)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone; the host's own end comes after
            self.cleanup()


def _return_code(result: ExecResult) -> int:
    if result.exit_code is not None:
        return result.exit_code
    return -1 if result.timed_out else 128 + (result.signal or 0)
