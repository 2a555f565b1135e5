"""What `make setup` installs and what only `make test` does; long steps say that they are alive."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]


def would_run(target: str) -> str:
    return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_what_only_tests_need_is_installed_by_make_test():
    for target in ("setup", "run", "docs", "lint"):
        said = would_run(target)
        assert "scripts/setup.sh" in said and "setup_tests.sh" not in said
    said = would_run("test")
    assert said.index("scripts/setup.sh") < said.index("scripts/setup_tests.sh") < said.index("run_tests.py")
    set_up, for_tests = ((ROOT / "scripts" / name).read_text() for name in ("setup.sh", "setup_tests.sh"))
    assert not re.search(r"install_(harness|browser)", set_up)
    assert "install_harness.sh agents verifiers" in for_tests and "install_browser.sh" in for_tests


def beat(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {{ {command}; }} | scripts/heartbeat.sh 1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_silence_is_counted_and_all_else_passes():
    done = beat("printf 'a step …  '; sleep 2.5; echo 'ok  (2 s)'; sleep 1.5; printf end; exit 3")
    assert done.stdout == "a step …  1 s … 2 s … ok  (2 s)\n    … 1 s\nend"
    assert done.returncode == 3, "the code is that of the step"


def test_without_silence_nothing_is_added():
    assert beat("printf 'x\\n\\n y'").stdout == "x\n\n y"


def test_the_answer_of_a_script_is_kept_apart_from_its_words():
    """As set-up calls the one for CRIU: words on standard error pass the heartbeat, standard output is taken."""
    line = next(line for line in (ROOT / "scripts/setup.sh").read_text().splitlines() if "install_criu.sh" in line)
    call = line.strip().removeprefix("if ").removesuffix("; then")
    call = call.replace('"${as_root[@]}" scripts/install_criu.sh', "tool")
    script = "set -uo pipefail; tool() { echo word >&2; echo /path; return $1; }; alive() { cat; }\n"
    script += f'{call}; echo "$?:$criu"'
    for code in (0, 1):
        done = subprocess.run(
            ["bash", "-c", script.replace("tool 9", f"tool {code} 9")], capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == (f"{code}:/path\n", "word\n")
