"""What README and documentation tell the reader to type: commands, Python, settings, each with its page and line."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parents[1]
# decisions and the changelog tell what was, not what to type
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("[a-z]*.md"))]
SHELL = ("sh", "bash", "console", "shell")
# known as commands also where they are not installed
PROGRAMS = (
    "belayer",
    "curl",
    "docker",
    "git",
    "harbor",
    "make",
    "pip",
    "podman",
    "pytest",
    "python",
    "ray",
    "uv",
    "vllm",
)


@dataclass(frozen=True)
class Block:
    """A block of code; `language` is what its fence says, or what an indented block looks like."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command line. `inline`: it stood in the text, where placeholders and mere names of commands are usual."""

    where: str
    words: tuple[str, ...]
    inline: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and indented ones that stand after an empty line and in no list."""
    lines = page.read_text().splitlines()
    number = 0
    in_list = False
    while number < len(lines):
        line = lines[number]
        if fence := re.match(r"^( *)(```+)(\w*)", line):
            begin = number + 1
            number = begin
            while number < len(lines) and not lines[number].startswith(fence[1] + fence[2]):
                number += 1
            text = "\n".join(each.removeprefix(fence[1]) for each in lines[begin:number])
            yield Block(page, begin + 1, fence[3] or _looks_like(text), text)
        elif re.match(r"^([-*]|\d+\.) ", line):
            in_list = True
        elif line and not line.startswith(" "):
            in_list = False
        elif line.startswith("    ") and not in_list and (number == 0 or not lines[number - 1].strip()):
            begin = number
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            text = "\n".join(each[4:] for each in lines[begin:number]).rstrip()
            yield Block(page, begin + 1, _looks_like(text), text)
            continue
        number += 1


def _looks_like(text: str) -> str:
    first = text.lstrip("# ").split("\n", 1)[0]
    if re.match(r"^\[\w+\]$", first):
        return "toml"
    if re.search(r"^(- )?\w+: ?(\S+)?$", text, re.MULTILINE) and not text.startswith("rollout "):
        return "yaml"
    program = next((word for word in first.split() if word != "sudo" and not re.match(r"-|[A-Z_]+=", word)), "")
    if "/" in program or program in PROGRAMS or (which(program) and program.islower()):
        return "sh"
    try:
        compile(text, "", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return "text"
    return "python"


def commands() -> list[Command]:
    """All command lines of all pages."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language in SHELL:
                found += [Command(str(block), words) for words in _lines(block.text)]
        text = re.sub(r"^( *```+).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for span in re.findall(r"`(belayer [^`\n]+)`", text):
            found.append(Command(str(page.relative_to(ROOT)), tuple(shlex.split(span)), inline=True))
    return found


def _lines(text: str) -> Iterator[tuple[str, ...]]:
    """The commands of a block, without comments, prompts, `sudo` and variables that are set for one of them."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" && | \|\| | \| ", line):
            words = shlex.split(part.removeprefix("$ "), comments=True)
            while words and (words[0] in ("sudo", "-E", "nice") or re.match(r"^[A-Z_0-9]+=", words[0])):
                words.pop(0)
            if words:
                yield tuple(words)
