"""TRL's own trainer with protected rollouts, and its tools in protected sandboxes."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes, needs_vllm
from tests.contract.adapter_kit import ROOT, run_struck

from belayer.config import Config, PolicyConfig
from belayer.journal.journal import read_histories

pytest.importorskip("trl", reason="needs the extra `train`")
pytestmark = [pytest.mark.contract, needs_sandboxes]


@needs_vllm
def test_the_trainer_makes_two_steps_while_a_sandbox_is_killed(tmp_path: Path) -> None:
    said, struck = run_struck(
        [sys.executable, str(ROOT / "examples/trl_rollouts.py")], tmp_path, "/tmp/note-trl", timeout_s=280
    )
    assert struck and "loss " in said, said
    histories = read_histories(tmp_path / "runs/trl/journal")
    assert len(histories) == 8 and all(history.finished for history in histories.values())
    assert sum(history.restores for history in histories.values()) == 1
    versions = {version for history in histories.values() for call in history.calls for version in call.versions}
    assert versions == {0, 1}, "the second step's rollouts are the second policy's"


@pytest.fixture
def host(tmp_path, monkeypatch):
    from belayer.integrations import ProtectedHost, _host

    host = ProtectedHost.open(tmp_path / "run", Config(policy=PolicyConfig(name="never")), sink=lambda event: None)
    monkeypatch.setattr(_host, "_shared", host)
    yield host
    host.close()


def test_a_tool_keeps_its_shell_through_a_kill_and_stops_the_trainer_where_it_cannot(host) -> None:
    from belayer.integrations.trl import EnvironmentLost, SandboxEnvironment

    def kill() -> None:
        os.kill(environment._protected.current.init_pid, signal.SIGKILL)

    environment = SandboxEnvironment()
    # what the trainer makes tools of
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    assert [name for name, _ in members if name[0] != "_"] == ["bash", "reset"]
    environment.reset(prompt=[{"role": "user", "content": "x"}])
    environment.bash("cd /tmp; x=5")
    kill()
    assert environment.bash("echo $x $PWD; exit_with() { return 3; }; exit_with") == "5 /tmp\n\n[exit code 3]"
    first = environment._protected
    environment.reset()
    assert environment._protected is not first and environment.bash("echo ${x:-none}") == "none\n"
    environment.bash("cat /proc/sys/kernel/random/uuid")
    kill()
    with pytest.raises(EnvironmentLost, match="could not be brought back"):
        try:
            environment.bash("echo on")
        except Exception as error:  # as the trainer does, which would tell the model
            pytest.fail(f"the trainer would train on this: {error}")
