"""The tool that models call where a harness lets them call tools: one shell, in OpenAI's form."""

from __future__ import annotations

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
