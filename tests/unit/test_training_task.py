"""How a task is found, and the example's task against a real shell."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import ConfigError
from belayer.training import load_task
from belayer.training.task import load_object, source_digest

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK: Any = load_task("shell_task.py:ShellTask", EXAMPLES)
shell_task: Any = sys.modules["shell_task"]


# -- finding it -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    known, path = set(sys.modules), list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]
    sys.path[:] = path


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("odd_task.py", "must look like `file.py:name`"),
        ("nowhere.py:Task", "there is no file"),
        ("odd_task.py:Taks", "did you mean `Task`"),
        ("odd_task.py:Bare", "has no `tasks`, `solve`"),
        ("odd_broken.py:Task", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_a_task_is_named(folder: Path, spec: str, says: str) -> None:
    (folder / "odd_task.py").write_text("class Task: ...\nclass Bare:\n    tokenizer = None\n")
    (folder / "odd_broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=re.escape(says)) as found:
        load_task(spec, folder)
    assert "train.task" in str(found.value)
    assert "odd_broken" not in sys.modules


def test_files_import_their_neighbours_and_are_loaded_once(folder: Path) -> None:
    (folder / "odd_one.py").write_text("import odd_two\nwhere = odd_two\n")
    (folder / "odd_two.py").write_text("value = []\n")
    two = load_object("odd_one.py:where", folder, key="x")
    assert load_object("odd_two.py:value", folder, key="x") is two.value


def test_a_second_module_of_the_same_name_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text("value = 1\n")
    with pytest.raises(ConfigError, match=r"rename json\.py"):
        load_object("json.py:value", folder, key="x")


def test_the_digest_covers_the_neighbours(folder: Path) -> None:
    (folder / "odd_one.py").write_text("import odd_two\n")
    (folder / "odd_two.py").write_text("value = 1\n")
    before = source_digest("odd_one.py:x", folder)
    assert source_digest("odd_one.py:y", folder) == before
    (folder / "odd_two.py").write_text("value = 2\n")
    assert source_digest("odd_one.py:x", folder) != before


# -- the shell task -------------------------------------------------------------------------------


class BashSandbox:
    """A real bash whose `/w` is a folder of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.session: asyncio.subprocess.Process | None = None

    async def exec(self, command: str) -> SimpleNamespace:
        shell = await self._bash("-c", self._inside(command))
        out, _ = await shell.communicate()
        return self._result(shell.returncode, out)

    async def shell(self, command: str, timeout_s: float | None = None) -> SimpleNamespace:
        self.session = self.session or await self._bash("--noprofile", "--norc")
        assert self.session.stdin is not None and self.session.stdout is not None
        self.session.stdin.write(f'{self._inside(command)}\necho " done $?"\n'.encode())
        out = b""
        while not (end := re.search(rb" done (\d+)\n$", out)):
            line = await asyncio.wait_for(self.session.stdout.readline(), 10)
            assert line, "the shell ended"
            out += line
        return self._result(int(end[1]), out[: end.start()])

    async def lose(self) -> None:
        """The shell dies and another one takes its place; the files stay."""
        if self.session is not None:
            self.session.kill()
            await self.session.wait()
            self.session = None

    async def _bash(self, *arguments: str) -> asyncio.subprocess.Process:
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            "bash", *arguments, stdin=pipe, stdout=pipe, stderr=null, cwd=self.root
        )

    def _inside(self, command: str) -> str:
        return re.sub(r"/w\b", str(self.root), command)

    def _result(self, code: int | None, out: bytes) -> SimpleNamespace:
        return SimpleNamespace(exit_code=code, stdout=out.replace(str(self.root).encode(), b"/w"))


class ScriptedRollout:
    """A rollout whose model says `commands`. `lose_after` is the turn after which the shell is lost."""

    def __init__(self, task: Any, commands: list[str], root: Path, lose_after: int | None = None) -> None:
        self.task, self.commands, self.lose_after = task, list(commands), lose_after
        self.sandbox = BashSandbox(root)
        self.seen: list[str] = []
        self.turns = 0

    async def observe(self, ids: list[int]) -> None:
        self.seen.append(TASK.tokenizer.decode(ids))

    async def generate(self, *, max_tokens: int, stop_token_ids: list[int]) -> SimpleNamespace:
        if self.lose_after == self.turns:
            await self.sandbox.lose()
        self.turns += 1
        ids = TASK.tokenizer.encode(self.commands.pop(0))
        stops = [at + 1 for at, token in enumerate(ids) if token in stop_token_ids]
        return SimpleNamespace(token_ids=ids[: min([max_tokens, *stops])])


def play(task: Any, commands: list[str], root: Path, lose_after: int | None = None) -> tuple[float, list[str]]:
    async def main() -> float:
        try:
            return await TASK.solve(rollout)
        finally:
            await rollout.sandbox.lose()

    rollout = ScriptedRollout(task, commands, root, lose_after)
    return asyncio.run(main()), rollout.seen


def example(operation: str = "caps") -> dict[str, Any]:
    """A prompt of the wanted operation."""
    return next(task for step in range(100) for task in TASK.tasks(step, 8, 1) if task["operation"] == operation)


@pytest.mark.parametrize("operation", ["same", "caps", "next"])
def test_the_right_commands_earn_everything(operation: str, tmp_path: Path) -> None:
    task = example(operation)
    letter = task["files"][task["folder"] + task["file"]]
    commands = [f"cd {task['folder']}\n", f"cat {task['file']}\n", f"echo {shell_task.answer(task)}>o\n"]
    reward, seen = play(task, commands, tmp_path)
    assert reward == 1.0
    assert seen == [f"{task['folder']}/{task['file']} {operation}\n$ ", "$ ", f"{letter}\n$ "]


def test_losing_the_shell_between_turns_costs_the_reward(tmp_path: Path) -> None:
    """What makes the task a test of recovery: the state that turn 2 needs is nowhere but in the sandbox."""
    task = example()
    commands = [f"cd {task['folder']}\n", f"cat {task['file']}\n", f"echo {shell_task.answer(task)}>o\n"]
    reward, seen = play(task, commands, tmp_path, lose_after=1)
    assert reward < 0.5
    assert seen[-1].startswith("!"), "the file is not where the new shell looks"


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        (["cd {folder}\n", "cat {file}\n", "echo {answer}>s\n"], 0.4),
        (["cd {other}\n", "cat ../{folder}/{file}\n", "echo {answer}>o\n"], 0.5),
        (["cd {folder}\n", "echo {answer}>o\n", "pwd\n"], 0.8),
        (["cat {folder}/{file}\n", "cd {other}\n", "echo {answer}>o\n"], 0.5),
        (["false\n", "cut off before its end", "\n"], 0.0),
    ],
)
def test_parts_of_the_work_earn_parts_of_the_reward(commands: list[str], reward: float, tmp_path: Path) -> None:
    task = example()
    other = next(folder for folder in shell_task.FOLDERS if folder != task["folder"])
    values = {"folder": task["folder"], "file": task["file"], "other": other, "answer": shell_task.answer(task)}
    got, _ = play(task, [command.format_map(values) for command in commands], tmp_path)
    assert got == reward


@pytest.mark.parametrize(
    ("code", "out", "seen"),
    [(0, b"k\n", "k\n"), (0, b"", ""), (0, b"12\n", "?\n"), (0, b"ab\n", "?\n"), (0, b"\xff\n", "?\n"),
     (1, b"k\n", "!1\n"), (127, b"", "!127\n"), (None, b"", "!\n")],
)  # fmt: skip
def test_what_may_differ_between_two_runs_is_never_shown(code: int | None, out: bytes, seen: str) -> None:
    assert shell_task.observation(code, out) == seen


def test_prompts_depend_on_the_seed_and_the_step_alone() -> None:
    first = TASK.tasks(3, 8, 1)
    assert TASK.tasks(3, 8, 1) == first == json.loads(json.dumps(first))
    assert TASK.tasks(3, 4, 1) == first[:4]
    assert TASK.tasks(4, 8, 1) != first != TASK.tasks(3, 8, 2)
    for task in first:
        assert len(set(task["files"].values())) == 9, "a letter names its file"


def test_demonstrations_mark_what_the_model_writes() -> None:
    examples = list(islice(TASK.warm_start_examples(5), 200))
    assert examples == list(islice(TASK.warm_start_examples(5), 200)) != list(islice(TASK.warm_start_examples(6), 200))
    for ids, mask in examples:
        assert len(ids) == len(mask)
        assert TASK.tokenizer.encode("?")[0] not in ids, "a character that the tokenizer does not have"
        text = "".join("\1"[not mark :] + TASK.tokenizer.decode([one]) for one, mark in zip(ids, mask, strict=True))
        commands = [part.replace("\1", "") for part in re.findall("(?:\1.)+", text, re.DOTALL)]
        assert len(commands) == shell_task.TURNS
        for command in commands:
            assert command.endswith("\n") and len(command) <= shell_task.MAX_TOKENS


@given(st.text(st.sampled_from(shell_task.CharTokenizer.characters)))
def test_text_goes_through_the_tokenizer_unchanged(text: str) -> None:
    assert TASK.tokenizer.decode(TASK.tokenizer.encode(text)) == text


def test_the_tokenizer_of_the_model_folder_gives_the_same_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    build = load_object("tiny_model.py:build", EXAMPLES, key="train.model")
    build(tmp_path, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "b/q caps\n$ cd b\n$ echo K>o\n"
    assert tokenizer(text)["input_ids"] == TASK.tokenizer.encode(text)
    assert tokenizer.decode(TASK.tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (TASK.tokenizer.eos_id, TASK.tokenizer.pad_id)
