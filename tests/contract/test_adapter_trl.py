"""TRL's own trainer with protected rollouts, and its tools in protected sandboxes."""

from __future__ import annotations

import inspect
import json
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool]:
    """The folder in which both examples have run, what was printed, and whether a sandbox of the first was killed."""
    folder = tmp_path_factory.mktemp("trl")
    program = [sys.executable, str(ROOT / "tests/contract/trl_trainings.py")]
    path = f"{ROOT}:{ROOT / 'src'}"
    said, struck = run_struck(program, folder, "/tmp/note-trl", timeout_s=280, PYTHONPATH=path)
    return folder, said, struck


@needs_vllm
def test_the_trainer_makes_two_steps_while_a_sandbox_is_killed(trained: tuple[Path, str, bool]) -> None:
    folder, said, struck = trained
    assert struck and "loss " in said, said
    histories = read_histories(folder / "runs/trl/journal")
    assert len(histories) == 8 and all(history.finished for history in histories.values())
    assert sum(history.restores for history in histories.values()) == 1
    versions = {version for history in histories.values() for call in history.calls for version in call.versions}
    assert versions == {0, 1}, "the second step's rollouts are the second policy's"


@needs_vllm
def test_a_training_whose_tools_act_in_sandboxes_ends_with_the_same_weights_after_a_kill(
    trained: tuple[Path, str, bool],
) -> None:
    folder, said, _ = trained
    told = json.loads(said.splitlines()[-1])
    assert told["struck"] == 1
    assert told["disturbed"] == told["calm"], "steps, losses, rewards and weights, to the bit"
    assert told["calm"]["weights"] != told["taught"], "it has learned something"
    steps = told["calm"]["log"][:2]
    assert [step["tools/failure_frequency"] for step in steps] == [0, 0]
    assert all(step["tools/call_frequency"] > 1 for step in steps) and any(step["reward_std"] for step in steps)
    histories = read_histories(Path(folder, told["journal"])).values()
    assert len(histories) == 24 and all(history.finished for history in histories)
    assert sum(history.restores for history in histories) == 1
    rewards = [history.reward for history in histories]
    assert rewards[:12] == rewards[12:] and set(rewards) == {0.0, 1.0}


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
