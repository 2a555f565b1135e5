"""The cache folder of a set-up is found again without BELAYER_CACHE, by programs and by scripts alike."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from belayer.ownership import cache_choice, cache_dir

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
# exported, recorded by set-up, XDG_CACHE_HOME -> which is taken; {home}: of the user
CASES = [
    ("/exported", "/recorded", "/xdg", "/exported"),
    ("", "/recorded", "/xdg", "/recorded"),
    ("", "", "/xdg", "/xdg/belayer"),
    ("", "", "", "{home}/.cache/belayer"),
]


@pytest.mark.parametrize(("exported", "recorded", "xdg", "taken"), CASES)
def test_commands_and_scripts_take_the_same(tmp_path: Path, monkeypatch, exported, recorded, xdg, taken):
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    (checkout / ".venv").mkdir()
    shutil.copy(ROOT / "scripts/cache.sh", checkout / "scripts")
    if recorded:
        (checkout / ".venv/belayer-cache").write_text(f"{recorded}\n")
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    for name, value in (("BELAYER_CACHE", exported), ("XDG_CACHE_HOME", xdg), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    expected = taken.format(home=tmp_path)
    assert str(cache_dir()) == expected
    script = 'set -euo pipefail; source scripts/cache.sh; echo "$cache $(bash -c \'echo "$BELAYER_CACHE"\')"'
    done = subprocess.run(["bash", "-c", script], cwd=checkout, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected, expected], "set, and exported to what a script calls"


def test_who_chose_it_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("BELAYER_CACHE", "/a")
    assert cache_choice() == (Path("/a"), "BELAYER_CACHE")
    monkeypatch.delenv("BELAYER_CACHE")
    assert cache_choice()[1] == "the default"
    (tmp_path / "belayer-cache").write_text("/b\n")
    assert cache_choice() == (Path("/b"), f"set-up, in {tmp_path}/belayer-cache")


def test_every_script_asks_the_same_place():
    for path in (ROOT / "scripts").glob("*.sh"):
        # the exception is told by whoever calls it: its own text is part of what names its environments
        if path.name not in ("cache.sh", "install_harness.sh"):
            assert "BELAYER_CACHE:-" not in path.read_text(), f"{path.name} does not know what set-up wrote down"
    assert os.access(ROOT / "scripts/setup_tests.sh", os.X_OK)
