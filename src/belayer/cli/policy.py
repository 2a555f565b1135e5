"""`belayer policy`: which checkpoint policy decides in a run, and another one from the next decision on."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from belayer.checkpoint.live_policy import FILE, read_choice
from belayer.cli.inspect import need_run
from belayer.config import PolicyConfig, load_config
from belayer.errors import ConfigError, RunInUse
from belayer.files import write_atomically
from belayer.run_directory import RunDirectory, configured, read_about

console = Console(highlight=False, soft_wrap=True)


def policy_command(run: Path, name: str | None, *, every: int | None, reset: bool) -> int:
    """Show or change it. Raises `RunError`, `ConfigError`."""
    need_run(run)
    read_about(run)  # before anything is changed
    file = run / FILE
    if reset and (name or every):
        raise ConfigError("--reset goes back to the configuration: it takes no policy", next_step="leave one out")
    if every is not None and name != "every-n":
        raise ConfigError("--every belongs to `every-n`", next_step=f"belayer policy {run} every-n --every {every}")
    if name is None and not reset:
        console.print(_described(run))
        return 0
    if reset:
        file.unlink(missing_ok=True)
    else:
        # the same checks and messages as for a configuration file
        choice = load_config(overrides={"policy.name": name, "policy.every": every}).policy
        write_atomically(file, json.dumps(choice.model_dump(mode="json")).encode() + b"\n")
    when = "from its next decision on" if _is_alive(run) else "when the run is resumed"
    console.print(f"{_described(run)}: {when}", markup=False)
    return 0


def _described(run: Path) -> str:
    chosen = read_choice(run / FILE)
    policy = chosen or _of_the_run(run)
    name = f"every-{policy.every}" if policy.name == "every-n" else policy.name
    return f"{run}: {name} ({'chosen by `belayer policy`' if chosen else 'as configured'})"


def _of_the_run(run: Path) -> PolicyConfig:
    settings = configured(read_about(run), "policy")
    return load_config(overrides={f"policy.{key}": value for key, value in settings.items()}).policy


def _is_alive(run: Path) -> bool:
    try:
        RunDirectory.open(run).close()
    except RunInUse:
        return True
    return False
