"""A small shell task whose state lives in the sandbox between turns.

The prompt is one line of a terminal, for instance `b/q caps`. The model has three turns, and this transcript earns the
full reward:

    b/q caps
    $ cd b              turn 1: the working directory changes, nothing is printed
    $ cat q             turn 2: relative to turn 1
    k
    $ echo K>o          turn 3: the transformed letter, in the file `o` of that directory

The commands are run by a real shell, whatever they are. Losing the sandbox between turns loses the working directory,
so the later commands act on other files and the reward is another one.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from belayer import Rollout

FOLDERS = "abc"
FILES = "pqr"
LETTERS = "efghijklmn"
OPERATIONS = {
    "same": lambda letter: letter,
    "caps": str.upper,
    "next": lambda letter: chr(ord(letter) + 1),
}
TURNS = 3
MAX_TOKENS = 12  # of one command, its newline included; the longest useful one has 9
COMMAND_TIMEOUT_S = 10.0

# The first demonstrations of the warm start are right, which teaches the task quickly; the later ones make mistakes, so
# that RL has something to improve. How often each kind is made sets the reward at which RL starts.
CLEAN_DEMONSTRATIONS = 9_000
WRONG_FOLDER = 0.45
WRONG_FILE = 0.4
WRONG_LETTER = 0.2
WRONG_PLACE = 0.2


class CharTokenizer:
    """One token per character. Quotes, brackets, pipes and the like are left out: no command can need more input."""

    special = ("<pad>", "<eos>")
    characters = (
        "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + "$>/.!?:+-=_,#@%~^"
    )  # fmt: skip

    def __init__(self) -> None:
        self.vocabulary = (*self.special, *self.characters)
        self._ids = {piece: index for index, piece in enumerate(self.vocabulary)}
        self.pad_id = self._ids["<pad>"]
        self.eos_id = self._ids["<eos>"]
        self.newline_id = self._ids["\n"]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; a character outside the vocabulary becomes `?`."""
        unknown = self._ids["?"]
        return [self._ids.get(character, unknown) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters of `ids`; special tokens are left out."""
        return "".join(self.vocabulary[index] for index in ids if index >= len(self.special))


class ShellTask:
    """Read the file that the prompt names, transform its letter, write the result where the checker looks."""

    tokenizer = CharTokenizer()

    def tasks(self, step: int, count: int, seed: int) -> list[dict[str, Any]]:
        """The `count` prompts of one optimiser step: a pure function of its arguments."""
        source = random.Random(f"{seed}/{step}")
        return [_new_task(source) for _ in range(count)]

    async def solve(self, rollout: Rollout) -> float:
        """One rollout: prepare the files, let the model act three times, look at what is there. Returns 0..1."""
        task, tokenizer, sandbox = rollout.task, self.tokenizer, rollout.sandbox
        await sandbox.exec(_preparation(task["files"]))
        await sandbox.shell("cd /w")
        await rollout.observe(tokenizer.encode(_prompt(task)))
        shown = set()
        for turn_number in range(TURNS):
            turn = await rollout.generate(max_tokens=MAX_TOKENS, stop_token_ids=[tokenizer.newline_id])
            text = tokenizer.decode(turn.token_ids)
            if text.endswith("\n"):
                # stdin is closed, so that `cat` without a name ends at once and does not wait for its time limit
                result = await sandbox.shell(f"{text[:-1]} </dev/null", timeout_s=COMMAND_TIMEOUT_S)
                seen = observation(result.exit_code, result.stdout)
            else:
                seen = "!\n"
            shown.add(seen.strip())
            if turn_number < TURNS - 1:
                await rollout.observe(tokenizer.encode(seen + "$ "))
        place = await sandbox.shell("pwd")
        written = await sandbox.exec(_CHECK)
        return score(task, shown, place.stdout.decode(errors="replace"), written.stdout.decode(errors="replace"))

    def warm_start_examples(self, seed: int) -> Iterator[tuple[list[int], list[int]]]:
        """Endless scripted transcripts that contain mistakes: (token ids, mask that is 1 for what the model writes)."""
        source = random.Random(f"warm start {seed}")
        for number in itertools.count():
            ids: list[int] = []
            mask: list[int] = []
            for text, by_model in _demonstration(_new_task(source), source, mistakes=number >= CLEAN_DEMONSTRATIONS):
                piece = self.tokenizer.encode(text)
                ids += piece
                mask += [int(by_model)] * len(piece)
            yield ids, mask


def observation(exit_code: int | None, stdout: bytes) -> str:
    """What the model sees of a command: a letter that it printed, `!` and the exit code, `?`, or nothing.

    Anything that could differ between two runs (process ids, dates, long listings) comes out as `?`.
    """
    if exit_code != 0:
        return "!\n" if exit_code is None else f"!{exit_code}\n"
    printed = stdout.decode(errors="replace").strip()
    if not printed:
        return ""
    return f"{printed}\n" if re.fullmatch("[a-zA-Z]", printed) else "?\n"


def answer(task: dict[str, Any]) -> str:
    """The letter that the checker wants to find."""
    return OPERATIONS[task["operation"]](task["files"][task["folder"] + task["file"]])


def score(task: dict[str, Any], shown: set[str], place: str, written: str) -> float:
    """Reward 0..1 from the sandbox's state.

    0.2 for a shell that ends in the right folder, 0.2 for having seen the file's letter, 0.3 for the right answer in
    any `o`, and 0.3 more when that is the one the checker looks at.
    """
    outputs = dict(line.split("=", 1) for line in written.split() if "=" in line)
    reward = 0.2 * (place.strip() == f"/w/{task['folder']}")
    reward += 0.2 * (task["files"][task["folder"] + task["file"]] in shown)
    reward += 0.3 * (answer(task) in outputs.values())
    reward += 0.3 * (outputs.get(task["folder"]) == answer(task))
    return round(reward, 6)


def _new_task(source: random.Random) -> dict[str, Any]:
    names = [folder + file for folder in FOLDERS for file in FILES]
    return {
        "folder": source.choice(FOLDERS),
        "file": source.choice(FILES),
        "operation": source.choice(sorted(OPERATIONS)),
        "files": dict(zip(names, source.sample(LETTERS, len(names)), strict=True)),
    }


def _prompt(task: dict[str, Any]) -> str:
    return f"{task['folder']}/{task['file']} {task['operation']}\n$ "


def _preparation(files: dict[str, str]) -> str:
    lines = [f"mkdir -p {' '.join(f'/w/{folder}' for folder in FOLDERS)}"]
    lines += [f"echo {letter} >/w/{name[0]}/{name[1]}" for name, letter in files.items()]
    return " && ".join(lines)


# prints `b=K` for every folder whose `o` has a first line
_CHECK = f"for d in {' '.join(FOLDERS)}; do [ -f /w/$d/o ] && read -r x </w/$d/o && echo $d=$x; done; true"


def _demonstration(task: dict[str, Any], source: random.Random, *, mistakes: bool) -> list[tuple[str, bool]]:
    """(text, written by the model) pieces of one transcript."""

    def choose(right: str, choices: Sequence[str], wrong_share: float) -> str:
        others = [choice for choice in choices if choice != right]
        return source.choice(others) if mistakes and source.random() < wrong_share else right

    folder = choose(task["folder"], FOLDERS, WRONG_FOLDER)
    file = choose(task["file"], FILES, WRONG_FILE)
    operation = choose(task["operation"], sorted(OPERATIONS), WRONG_LETTER)
    place = choose("o", "os", WRONG_PLACE)
    letter = task["files"][folder + file]
    return [
        (_prompt(task), False),
        (f"cd {folder}\n", True),
        ("$ ", False),
        (f"cat {file}\n", True),
        (f"{letter}\n$ ", False),
        (f"echo {OPERATIONS[operation](letter)}>{place}\n", True),
    ]
