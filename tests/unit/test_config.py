"""Bad configuration: one clear error that names the key, and for a typo the key that was meant."""

from __future__ import annotations

import pytest

from belayer.config import Config, load_config
from belayer.errors import ConfigError

pytestmark = pytest.mark.unit


def load(tmp_path, text, **overrides):
    path = tmp_path / "x.toml"
    path.write_text(text)
    return load_config(path, overrides)


def test_defaults_are_valid():
    assert Config().engine.standby == "process"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine]\nstandbye = 'none'", "did you mean `engine.standby`"),
        ("[polcy]\nname = 'always'", "did you mean `policy`"),
        ("[engine]\nxyzzy = 1", "known here: engine.backend"),
        ("[engine]\nstandby = 'perhaps'", "`engine.standby`"),
        ("[engine]\nmax_num_seqs = 0", "greater than or equal to 1"),
        ("[train]\nsteps = 3", "`train.task`"),
        ("engine = 3", "engine"),
        ("[engine", "cannot be read as TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert "x.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "none.toml")


def test_environment_beats_file_and_flags_beat_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("BELAYER_ENGINE__MAX_NUM_SEQS", "7")
    monkeypatch.setenv("BELAYER_RUN__SEED", "5")
    config = load(tmp_path, "[engine]\nmax_num_seqs = 3\n[run]\nseed = 1", **{"run.seed": 9, "engine.dtype": None})
    assert (config.engine.max_num_seqs, config.run.seed, config.engine.dtype) == (7, 9, "float32")


def test_an_unknown_environment_key_is_an_error_too(monkeypatch):
    monkeypatch.setenv("BELAYER_ENGINE__STANDBYE", "none")
    with pytest.raises(ConfigError, match=r"engine\.standby"):
        load_config()
