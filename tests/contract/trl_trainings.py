"""The examples of the TRL adapter, one after another in one process: importing TRL takes longer than training.

1. `examples/trl_rollouts.py`; who started this kills one of its sandboxes.
2. `examples/trl_environment.py`, undisturbed, with a model that has been taught to call the tool.
3. The same again, while a sandbox is killed.

The last line printed says as JSON what 2 and 3 came to.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from tests.contract.adapter_kit import ROOT, striking
from tests.taught_model import make_tool_caller
from transformers import AutoModelForCausalLM

from belayer.integrations._host import shared_host
from belayer.integrations.trl import SandboxEnvironment

COLOURS = ("red", "blue")
TIMINGS = ("time", "per_second")  # parts of names of entries of the trainer's log that no two runs share


def conversation(asked: str, written: str) -> list[dict[str, Any]]:
    def call(command: str) -> dict[str, Any]:
        function = {"name": "bash", "arguments": {"command": command}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    return [
        {"role": "user", "content": f"Write {asked} into the file note-tools."},
        call(f"echo {written} > note-tools; sleep 0.1"),
        {"role": "tool", "name": "bash", "content": ""},
        call("cat note-tools"),  # found only where the shell still is
        {"role": "tool", "name": "bash", "content": f"{written}\n"},
        {"role": "assistant", "content": "written"},
    ]


def digest(model: Any) -> str:
    weights = hashlib.sha256()
    for _, tensor in sorted(model.named_parameters()):
        weights.update(tensor.detach().numpy().tobytes())
    return weights.hexdigest()


def train_with_tools(model: Path) -> dict[str, Any]:
    sys.argv = ["trl_environment.py", str(model)]
    trainer = runpy.run_path(str(ROOT / "examples/trl_environment.py"), run_name="__main__")["trainer"]
    log = [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMINGS)}
        for entry in trainer.state.log_history
    ]
    return {"weights": digest(trainer.model), "log": log}


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["trl_rollouts.py"]
    runpy.run_path(str(ROOT / "examples/trl_rollouts.py"), run_name="__main__")
    torch.set_num_threads(1)  # else sums depend on who else has the processors
    model = Path("runs/tool_model")
    conversations = [conversation(asked, written) for asked in COLOURS for written in COLOURS]
    make_tool_caller(model, conversations, [object.__new__(SandboxEnvironment).bash])
    taught = digest(AutoModelForCausalLM.from_pretrained(model))
    calm = train_with_tools(model)
    with striking("/notes/note-tools") as struck:
        disturbed = train_with_tools(model)
    journal = str(shared_host().directory / "journal")
    print(
        json.dumps({"taught": taught, "calm": calm, "disturbed": disturbed, "struck": len(struck), "journal": journal})
    )


if __name__ == "__main__":
    main()
