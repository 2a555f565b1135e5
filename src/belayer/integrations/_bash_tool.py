"""How models are told of the shell: as a tool in OpenAI's form, or in words where nobody parses tool calls."""

from __future__ import annotations

import re
from typing import Any

BASH_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a bash shell that stays the same for the whole conversation.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}

TEXT_INSTRUCTIONS = (
    "To run a command in a bash shell that stays the same for the whole conversation, write it in one block that "
    "begins with a line ```bash and ends with a line ```. Its output is the next message. A message without a block "
    "ends the conversation."
)
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def command_in(text: str) -> str | None:
    """The first command in what a model says, or None where it says nothing to run."""
    block = _BLOCK.search(text)
    return block[1] if block else None
