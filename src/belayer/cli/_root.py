"""The `belayer` command itself; its subcommands are in the `_commands_*` modules."""

from __future__ import annotations

from cyclopts import App

from belayer import __version__

app = App(
    name="belayer",
    version=__version__,
    help="Fault tolerance for LLM agentic RL training: engine workers and sandboxes die, rollouts go on.",
)
