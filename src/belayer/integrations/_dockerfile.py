"""The part of a Dockerfile that can be done in a sandbox without a network: FROM, WORKDIR, ENV, COPY, RUN.

For harnesses whose tasks bring one. Anything else is refused by name, and the way out is an image that was built
elsewhere: `belayer image import`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePosixPath

import msgspec

IGNORED = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL")


class Step(msgspec.Struct, frozen=True):
    """`kind` is "run" (then `command`) or "copy" (then `sources`, on the host, and `target`); `cwd` holds for both."""

    kind: str
    cwd: str
    command: str = ""
    sources: tuple[str, ...] = ()
    target: str = ""


class Recipe(msgspec.Struct, frozen=True):
    """What a Dockerfile asks for: a base image, steps in their order, and what holds in the end."""

    base: str
    steps: list[Step]
    workdir: str
    env: dict[str, str]


def read(dockerfile: Path) -> Recipe:
    """Parse it. Raises `ValueError` that names the line which is not understood."""
    base, workdir = "", "/"
    env: dict[str, str] = {}
    steps: list[Step] = []
    for number, line in _lines(dockerfile.read_text()):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        where = f"{dockerfile}:{number}"
        if word == "FROM":
            if base:
                raise ValueError(f"{where}: a second FROM; images of several stages have to be built elsewhere")
            base = rest.split()[-1] if not rest.startswith("--") else rest.split()[1]
        elif word == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest)
            steps.append(Step("run", "/", command=f"mkdir -p {shlex.quote(workdir)}"))
        elif word == "ENV":
            pairs = shlex.split(rest) if "=" in rest.split(None, 1)[0] else ["=".join(rest.split(None, 1))]
            for pair in pairs:
                name, _, value = pair.partition("=")
                env[name] = value
        elif word == "RUN" and not rest.startswith(("[", "--", "<<")):
            steps.append(Step("run", workdir, command=rest))
        elif word == "COPY" and not rest.startswith(("[", "--", "<<")):
            *sources, target = shlex.split(rest)
            steps.append(Step("copy", workdir, sources=tuple(sources), target=target))
        elif word not in IGNORED:
            raise ValueError(
                f"{where}: {line.split(chr(10))[0]!r} cannot be done in a sandbox; build the image elsewhere"
            )
    if not base:
        raise ValueError(f"{dockerfile}: no FROM")
    return Recipe(base, steps, workdir, env)


def _lines(text: str) -> list[tuple[int, str]]:
    """(number, instruction) with continuations joined, without comments."""
    found, begun, parts = [], 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not parts and not line.strip()):
            continue
        begun = begun or number
        continued = re.fullmatch(r"(.*)\\\s*", line)
        parts.append((continued[1] if continued else line).strip())
        if not continued:
            found.append((begun, " ".join(part for part in parts if part)))
            begun, parts = 0, []
    if parts:
        found.append((begun, " ".join(parts)))
    return found
