"""What cannot be done is said in one error, with what was kept and what to do; the code is not 0, and nothing is left.

The commands run as a user runs them, one process each, forked from this one so that none has to import everything.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer.cli.app import main

pytestmark = pytest.mark.unit


def in_child(work: Callable[[], None]) -> tuple[int, str]:
    """Exit code of `work` in a forked process, and everything that it printed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            for number, stream in ((1, "stdout"), (2, "stderr")):
                setattr(sys, stream, open(number, "w", closefd=False))  # noqa: SIM115 - until the process ends
            work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as said:
        text = said.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def belayer(folder: Path, *arguments: str, then: Callable[[], None] = main) -> tuple[int, str]:
    def work() -> None:
        os.chdir(folder)
        sys.argv = ["belayer", *arguments]
        then()

    return in_child(work)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with runs that cannot be used, and other things that are not what they should be."""
    about = '{"format": 1, "seed": 0}'
    runs = {"empty": None, "newer": '{"format": 9}', "damaged": '{"format"', "calm": about, "odd": about}
    for name, text in runs.items():
        (tmp_path / name / "journal").mkdir(parents=True)
        if text is not None:
            (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "odd" / "metrics.jsonl").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    return tmp_path


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("show nowhere", 1, "nowhere does not exist"),
        ("show file", 1, "is a file, not a run's folder"),
        ("show empty", 1, "it has no run.json"),
        ("show newer", 1, "run format 9"),
        ("status newer", 1, "run format 9"),
        ("status odd", 1, "metrics.jsonl"),
        ("compare newer calm", 1, "run format 9"),
        ("compare calm calm", 1, "nothing to compare"),
        ("verify newer", 1, "run format 9"),
        ("policy damaged", 1, "run.json is damaged"),
        ("resume file", 1, "there is no run at"),
        ("resume newer", 1, "run format 9"),
        ("report calm", 1, "no metrics.jsonl"),
        ("checkpoint import file new", 1, "not a checkpoint archive"),
        ("checkpoint import nowhere new", 1, "there is no file nowhere"),
        ("train binary.toml", 2, "cannot be read as TOML"),
        ("train empty", 2, "cannot be read as TOML"),
        ("bench nothing", 2, "no benchmark nothing"),
        ("bench faults --faults 0", 2, "--faults 0"),
        ("bench overhead --scale -1", 2, "--scale -1"),
        ("bench gateway --kills 0", 2, "--kills 0"),
        ("bench faults --quick --json empty", 2, "cannot be written"),
        ("bench faults --quick --json file/x.json", 2, "cannot be written"),
        ("serve empty --port 99999", 2, "99999 is no port"),
        ("serve nowhere", 2, "there is no model folder"),
    ],
)
def test_what_cannot_be_done_is_said(place, command, code, says):
    before = tree(place)
    found, text = belayer(place, *command.split())
    assert (found, "Traceback" in text) == (code, False), text
    assert says in " ".join(text.split())
    assert "error:" in text or command.startswith("compare calm")
    assert tree(place) - before <= {"newer/lock"}  # whoever opens a run to resume it locks it first


def test_no_room_and_no_right_are_told_apart(place):
    def fails(error: OSError) -> tuple[int, str]:
        from belayer.cli import inspect

        def refuse(*_: object) -> int:
            raise error

        def work() -> None:
            inspect.compare_command = refuse
            main()

        return belayer(place, "compare", "calm", "calm", then=work)

    code, text = fails(OSError(28, "No space left on device", "/disk/x"))
    assert code == 1 and "/disk/x" in text and "next: make room there" in text
    code, text = fails(PermissionError(13, "Permission denied", "/root/x"))
    assert code == 1 and "/root/x" in text and "need root" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_cleans_up_and_says_so(place, number):
    def work() -> None:
        from belayer.cli import inspect

        def waits(*_: object) -> int:
            try:
                os.kill(os.getpid(), number)
                signal.pause()
            finally:
                Path("cleaned up").touch()
            return 0

        signal.signal(signal.SIGINT, signal.default_int_handler)
        inspect.compare_command = waits
        main()

    code, text = belayer(place, "compare", "calm", "calm", then=work)
    assert code == 130 and "Traceback" not in text and (place / "cleaned up").exists()
