"""The README shows the example as it is, and names only commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]


def test_the_example_is_the_file():
    readme = (ROOT / "README.md").read_text()
    source = (ROOT / "examples" / "own_environment.py").read_text().split('"""', 2)[2].strip()
    assert f"```python\n{source}\n```" in readme
    assert not re.search(r"@[A-Z]+@", readme), "a figure was never filled in"


def test_every_command_exists():
    from belayer.cli.app import app

    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"belayer (train|resume|doctor|bench|show|compare|report|[a-z]+)\b", readme))
    known = {name for name in app if not name.startswith("-")}
    assert {"train", "resume", "doctor", "bench"} <= named & known
    commands = set(re.findall(r"`belayer ([a-z]+)", readme))
    assert commands <= known, commands - known


def test_what_the_base_image_holds_is_described():
    from belayer.sandbox.images import BASE_PACKAGES

    told = (ROOT / "docs/sandbox.md").read_text().partition("Set-up makes `base`")[2].partition("\n\n")[0]
    told = told.replace("Python 3 with pip", "python3 python3-pip")
    libraries = {"libc-bin", "ncurses-base"}  # nothing that one would call
    assert set(BASE_PACKAGES) - libraries <= set(re.findall(r"[a-z][a-z0-9-]+", told))


def test_every_link_to_a_file_works():
    made = {ROOT / "docs/reference/cli.md", ROOT / "docs/reference/settings.md"}  # by `make docs`, from the program
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            path = (page.parent / target).resolve()
            assert path.exists() or path in made, f"{page.name} links to {target}"
