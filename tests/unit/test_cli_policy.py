"""`belayer policy` writes what a living run reads, and refuses what it could not use."""

from __future__ import annotations

import pytest

from belayer.checkpoint.live_policy import LivePolicy
from belayer.cli.policy import policy_command
from belayer.config import Config, PolicyConfig
from belayer.errors import ConfigError, RunError
from belayer.run_directory import RunDirectory

pytestmark = pytest.mark.unit


def test_shown_changed_and_reset(tmp_path, capsys):
    run = tmp_path / "run"
    directory = RunDirectory.open(run, about={"config": Config().model_dump(mode="json")})
    living = LivePolicy(PolicyConfig(), run / "policy.json")

    def say(name=None, **options) -> str:
        assert policy_command(run, name, every=options.get("every"), reset=options.get("reset", False)) == 0
        return capsys.readouterr().out.strip()

    assert say() == f"{run}: adaptive (as configured)"
    assert say("every-n", every=4) == f"{run}: every-4 (chosen by `belayer policy`): from its next decision on"
    living._look()
    assert living.name == "every-4"
    directory.close()
    assert say("paper").endswith("paper (chosen by `belayer policy`): when the run is resumed")
    assert say(reset=True).startswith(f"{run}: adaptive (as configured)")
    living._look()
    assert living.name == "adaptive"


@pytest.mark.parametrize(
    "name, every, reset, says",
    [
        ("sometimes", None, False, "policy.name"),
        ("every-n", 0, False, "policy.every"),
        ("paper", 3, False, "belongs to `every-n`"),
        ("paper", None, True, "--reset"),
    ],
)
def test_what_cannot_be_used_changes_nothing(tmp_path, name, every, reset, says):
    RunDirectory.open(tmp_path, about={"config": {}}).close()
    with pytest.raises(ConfigError, match=says):
        policy_command(tmp_path, name, every=every, reset=reset)
    assert not (tmp_path / "policy.json").exists()


def test_no_run_there(tmp_path):
    with pytest.raises(RunError):
        policy_command(tmp_path, "always", every=None, reset=False)
