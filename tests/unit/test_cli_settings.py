"""`belayer settings` prints a configuration that can be used and leaves nothing out."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from belayer.cli.settings import as_toml, sections, settings_command
from belayer.config import Config

pytestmark = pytest.mark.unit


def test_it_is_a_configuration_and_says_the_defaults():
    assert Config.model_validate(tomllib.loads(as_toml())) == Config()


def test_every_setting_is_there_with_its_meaning():
    blocks = dict(re.findall(r"^(?:# )?\[(\w+)\]\n(.*?)(?=\n\n|\Z)", as_toml(), flags=re.DOTALL | re.MULTILINE))
    for name, model in sections():
        told = " ".join(line.removeprefix("# ") for line in blocks[name].splitlines())
        for key, field in model.model_fields.items():
            assert f"{key} = " in told
            assert (field.description or "") in told
    assert "One of: process, image, none." in blocks["engine"].replace("\n# ", " ")
    assert "kv_bytes = 268435456" in blocks["engine"] and "(256 MiB)" in blocks["engine"]


def test_train_with_its_marks_removed_is_a_training_job():
    text = as_toml()
    head, _, rest = text.partition("# [train]\n")
    train = re.sub(r"^# (?=\w+ = )", "", rest.partition("\n\n")[0], flags=re.MULTILINE).replace(
        "task = …", 'task = "a.py:A"'
    )
    found = Config.model_validate(tomllib.loads(f"{head}[train]\n{train}"))
    assert found.train is not None and found.train.steps == 30


def test_as_json_it_is_the_schema(capsys: pytest.CaptureFixture[str]):
    assert settings_command(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["$defs"]["EngineConfig"]["properties"]["hang_s"]["default"] == 2.0
