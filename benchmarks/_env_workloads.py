"""The workloads of `belayer bench env`: sessions of an agent, and how to see whether one is what it should be.

Each begins with the same session of an agent that looks around, writes a tool, uses it and commits it; then comes what
the workload is about. A rollout's real session is longer (30 to 100 actions): a replay then takes longer, a restore
does not.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ._env_state import ASK, MEMORY, READY_S, SERVER, Box, ask, memory, must

MEMORY_BYTES = 100 << 20
FILES, FILE_BYTES = 20_000, 20_480
FILES_A_TURN = 1000  # 20 MB
MODULES = 100

_MAKE_FILES = """
import os
for number in range({first}, {last}):
    folder = f"/data/tree/{{number // 200}}"
    if number % 200 == 0:
        os.makedirs(folder, exist_ok=True)
    with open(f"{{folder}}/{{number}}", "wb") as file:
        file.write((number + {turn}).to_bytes(4, "little") * ({size} // 4))
"""
_TOOL = """
import collections, pathlib, sys
words = collections.Counter(pathlib.Path(sys.argv[1]).read_text().split())
print(sum(words.values()), len(words), words.most_common(1)[0][0])
"""
_TEST = """
import unittest, calculator
class Add(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calculator.add(2, 2), 4)
"""


@dataclass(frozen=True)
class Action:
    """One action of a session. `files_only`: its whole effect is in the file system."""

    command: str
    files_only: bool = False


@dataclass(frozen=True)
class Workload:
    """`files` are put there first, then `setup` runs once; before each checkpoint comes `turn(number)`.

    `digest` is a command whose output describes the files.
    """

    name: str
    setup: list[Action]
    digest: str = "cat /data/* 2>/dev/null"
    files: dict[str, bytes] = field(default_factory=dict)
    turn_command: Callable[[int], str] = lambda number: ":"
    has_memory: bool = False
    has_server: bool = False
    slow: bool = False  # one round takes many seconds

    def turn(self, number: int) -> list[Action]:
        """What happens between two checkpoints."""
        return [Action(self.turn_command(number), files_only=True), Action(f"step {number}")]


@dataclass(frozen=True)
class State:
    """What a sandbox held at a checkpoint."""

    files: str
    memory: str
    asked: int
    turn: int


def _python(program: str) -> str:
    return f"python3 - <<'END'\n{program}\nEND"


_SHELL = [
    Action("mkdir -p /data && echo begun > /data/log", files_only=True),
    Action("cd /data && export MODE=bench && words='two words' && list=(1 2 3)"),
    Action('step() { turn=$1; echo "$words $1" >> /data/log; }'),
    Action("(while sleep 0.2; do :; done) & job=$!"),
]
_LOOK_AROUND = [
    Action(command, files_only=True)
    for command in (
        "ls /usr/bin | wc -l >> notes",
        "find /usr/lib/python3* -name '*.py' | wc -l >> notes",
        "grep -rl 'def main' /usr/lib/python3*/*.py | sort | head -n 20 >> notes",
        "sed -n '1,80p' /usr/lib/python3*/argparse.py > excerpt",
        "head -c 200 /etc/passwd >> notes; wc -c /etc/passwd >> notes",
        f"cat > tool.py <<'END'\n{_TOOL}\nEND",
        "python3 tool.py excerpt >> notes",
        "git init -q -b main . && git config user.name a && git config user.email a@b",
        "export GIT_AUTHOR_DATE=2026-01-01T00:00:00Z GIT_COMMITTER_DATE=2026-01-01T00:00:00Z;"
        " git add tool.py && git commit -qm tool; unset GIT_AUTHOR_DATE GIT_COMMITTER_DATE",
        "sed -i 's/most_common(1)/most_common(2)/' tool.py && git diff --stat >> notes",
        "python3 tool.py excerpt >> notes",
        "python3 -c 'import json; print(json.dumps({\"a\": 1}))' >> notes",
        "git log --format=%s >> notes; git status --short >> notes",
    )
]
_SESSION = [*_SHELL, *_LOOK_AROUND]


def _idle() -> Workload:
    return Workload("idle shell", _SESSION)


def _heap() -> Workload:
    wait = "until test -e /tmp/memory-ready; do sleep 0.02; done"
    return Workload(
        "process with 100 MB",
        [
            *_SESSION,
            Action(f"cat > /data/memory.py <<'END'\n{MEMORY.format(size=MEMORY_BYTES)}\nEND", files_only=True),
            Action(f"rm -f /tmp/memory-ready; python3 /data/memory.py & memory=$!; {wait}"),
        ],
        has_memory=True,
    )


def _http() -> Workload:
    program = SERVER.format(data='hashlib.shake_128(b"belayer").digest(1 << 20)')
    return Workload(
        "HTTP server",
        [
            *_SESSION,
            Action(f"cat > /data/server.py <<'END'\n{program}\nEND", files_only=True),
            Action(f"python3 /data/server.py & server=$!; until ({ASK}) >/dev/null 2>&1; do sleep 0.02; done"),
        ],
        has_server=True,
    )


def _tree() -> Workload:
    def turn(number: int) -> str:
        first = number * FILES_A_TURN % FILES
        last = first + FILES_A_TURN
        return _python(_MAKE_FILES.format(first=first, last=last, turn=number + 1, size=FILE_BYTES))

    everything = _MAKE_FILES.format(first=0, last=FILES, turn=0, size=FILE_BYTES)
    return Workload(
        "20,000 changed files, 400 MB",
        [*_SESSION, Action(_python(everything), files_only=True)],
        # each file repeats one number: its ends and its length tell, and reading all of it 5 times a round would not do
        digest=(
            "cat /data/log /data/notes; cd /data/tree && find . -type f -printf '%p %s\\n' | sort | md5sum;"
            " head -qc 4 */* | md5sum; tail -qc 4 */* | md5sum"
        ),
        turn_command=turn,
        slow=True,
    )


def _git() -> Workload:
    return Workload(
        "git edit and test",
        [
            *_SESSION,
            Action(
                "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b"
                " GIT_AUTHOR_DATE=2026-01-01T00:00:00Z GIT_COMMITTER_DATE=2026-01-01T00:00:00Z"
            ),
            Action(
                f"git init -q -b main /data/repo && cat > /data/repo/test_calculator.py <<'END'\n{_TEST}\nEND",
                files_only=True,
            ),
            Action("printf 'def add(a, b):\\n    return a - b\\n' > /data/repo/calculator.py", files_only=True),
            Action("(cd /data/repo && git add . && git commit -qm first)", files_only=True),
            Action("! (cd /data/repo && python3 -B -m unittest -q) >/data/before 2>/dev/null", files_only=True),
            Action("sed -i 's/a - b/a + b/' /data/repo/calculator.py", files_only=True),
            Action("(cd /data/repo && python3 -B -m unittest -q) >/data/after 2>/dev/null", files_only=True),
            Action("(cd /data/repo && git commit -qam second)", files_only=True),
        ],
        digest="cat /data/log /data/repo/calculator.py; cd /data/repo && git log --format='%H %s' && git status -s",
        turn_command=lambda number: (
            f"echo '# {number}' >> repo/calculator.py && cd repo && python3 -B -m unittest -q 2>/dev/null"
            f" && git commit -qam {number}; cd /data"
        ),
    )


def _install(pip: bytes) -> Workload:
    return Workload(
        "package install",
        [
            *_SESSION,
            Action("mkdir -p wheels && mv /tmp/demo-1-py3-none-any.whl wheels/", files_only=True),
            Action(
                "python3 /tmp/pip.whl/pip install --quiet --disable-pip-version-check --root-user-action=ignore"
                " --break-system-packages --no-index --find-links wheels demo"
                " || python3 /tmp/pip.whl/pip install --quiet --disable-pip-version-check --root-user-action=ignore"
                " --no-index --find-links wheels demo",
                files_only=True,
            ),
            Action("python3 -c 'import demo; print(demo.total())' > total", files_only=True),
        ],
        digest=(
            "cat /data/log /data/total; cd /tmp && python3 -c 'import demo, os; print(os.path.dirname(demo.__file__))'"
            " > /tmp/where && cd $(cat /tmp/where) && cat *.py | sha256sum && ls | wc -l"
        ),
        files={"/tmp/pip.whl": pip, "/tmp/demo-1-py3-none-any.whl": _wheel()},
    )


def workloads(quick: bool) -> list[Workload]:
    """Those that a run measures."""
    found = [_idle(), _heap(), _http()]
    if not quick:
        found += [_tree(), _git()]
        if pip := pip_wheel():
            found.append(_install(pip.read_bytes()))
    return found


def skipped(quick: bool) -> dict[str, str]:
    """Workloads that a run does not measure, with the reason."""
    if quick:
        why = "it takes too long for a quick run"
        return dict.fromkeys(["20,000 changed files, 400 MB", "git edit and test", "package install"], why)
    return {} if pip_wheel() else {"package install": "this host has no wheel of pip (package python3-venv)"}


def pip_wheel() -> Path | None:
    """A wheel of pip on this host: the one that makes virtual environments."""
    import ensurepip

    places = [Path("/usr/share/python-wheels"), Path(ensurepip.__file__).parent / "_bundled", Path(sys.prefix)]
    return next((wheel for place in places for wheel in sorted(place.glob("pip-*.whl"))), None)


def _wheel() -> bytes:
    """A package of many modules, as a wheel."""
    out = io.BytesIO()
    record = []
    with zipfile.ZipFile(out, "w") as wheel:

        def add(name: str, text: str) -> None:
            wheel.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text)
            record.append(f"{name},,")

        imports = "".join(f"    from demo import m{n}; sum += m{n}.value(1)\n" for n in range(MODULES))
        add("demo/__init__.py", f"def total():\n    sum = 0\n{imports}    return sum\n")
        for n in range(MODULES):
            body = "".join(f"def f{i}(x):\n    return x * {i} + {n}\n\n" for i in range(60))
            add(f"demo/m{n}.py", f"{body}def value(x):\n    return f{n % 60}(x)\n")
        add("demo-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1\n")
        about = "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        add("demo-1.dist-info/WHEEL", about)
        add("demo-1.dist-info/RECORD", "\n".join([*record, "demo-1.dist-info/RECORD,,"]) + "\n")
    return out.getvalue()


# -- doing it and looking at it ----------------------------------------------------------------------------------------
async def begin(box: Box, workload: Workload) -> None:
    """Files and set-up of a workload."""
    for path, data in workload.files.items():
        await box.write(path, data)
    await perform(box, workload.setup)


async def perform(box: Box, actions: list[Action]) -> None:
    """Actions in the persistent shell. Raises `RuntimeError` when one fails."""
    for action in actions:
        must(await box.shell(action.command, timeout_s=READY_S), action.command)


async def look(box: Box, workload: Workload, turn: int) -> State:
    """The state to compare with later."""
    files = must(await box.exec(workload.digest, timeout_s=READY_S), "looking at the files")
    held = await memory(box) if workload.has_memory else ""
    return State(files, held, (await ask(box))[1] if workload.has_server else 0, turn)


async def differences(box: Box, workload: Workload, state: State, *, again: bool = False) -> set[str]:
    """What is not as in `state`: of files, shell, memory, jobs, http.

    `again`: the state was made again instead of restored, so a server begins to count anew.
    """
    found = set()
    files = await box.exec(workload.digest, timeout_s=READY_S)
    lost = await box.exec("test -e /data/lost", timeout_s=READY_S)
    if files.stdout.decode() != state.files or lost.ok:
        found.add("files")
    shell = await box.shell('echo "$PWD|$MODE|$words|${list[*]}|$turn|$(type -t step)"')
    if shell.stdout.decode().strip() != f"/data|bench|two words|1 2 3|{state.turn}|function":
        found.add("shell")
    if b"Running" not in (await box.shell("kill -0 $job && jobs -r")).stdout:
        found.add("jobs")
    if workload.has_memory and await memory(box) != state.memory:
        found.add("memory")
    if workload.has_server:
        asked = (await ask(box))[1]
        if asked < 1 or (not again and asked != state.asked + 1):
            found.add("http")
    return found
