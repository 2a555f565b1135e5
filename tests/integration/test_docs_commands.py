"""Whatever README and documentation tell the reader to type works: commands, Python, settings."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import docs_runs
from tests.conftest import needs_sandboxes, needs_vllm
from tests.crash.test_train_job import SMALL
from tests.docs_kit import PAGES, ROOT, Block, Command, blocks, commands

from belayer.cli.app import app
from belayer.config import Config, TrainConfig

pytestmark = pytest.mark.integration
COMMANDS = commands()
BLOCKS = [block for page in PAGES for block in blocks(page)]

# other people's programs that our pages name: they are not here, or not ours to run
FOREIGN = {
    "pip": "installs packages",
}
# what the text has declared before a piece of Python begins
NAMES = {
    "batches": "list[list[Any]]",
    "box": "Sandbox",
    "config": "Config",
    "engine": "Engine",
    "k": "int",
    "manifest": "Manifest",
    "model": "Any",
    "run": "Run",
    "rollout": "Rollout",
    "sandbox": "Sandbox",
    "sandboxes": "Sandboxes",
    "solve": "Callable[[Rollout], Awaitable[float]]",
    "tasks": "list[Any]",
    "tokenizer": "Any",
    "trajectory": "Trajectory",
    "train_on": "Callable[[list[Trajectory]], None]",
}
# big packages whose types are not what is checked here
OTHERS = ("datasets", "harbor", "openai", "torch", "transformers", "trl", "verifiers")
# pydantic makes sections of tables, which a type checker does not know; an attribute may be None before a start
FORGIVEN = re.compile(r'"dict\[.*to parameter "\w+" of type "\w+Config"|Argument of type "\w+ \| None"')
PREAMBLE = """\
from __future__ import annotations
from collections.abc import Awaitable, Callable
from typing import Any
from belayer import Config, Rollout, Run, Trajectory
from belayer.engine import Engine
from belayer.sandbox import Manifest, Sandbox, Sandboxes
"""


# -- commands ----------------------------------------------------------------------------------------------------------
def test_commands_are_found():
    assert len(COMMANDS) > 40 and any(command.inline for command in COMMANDS)


@pytest.mark.parametrize("command", sorted({(c.words, c.inline): c for c in COMMANDS}.values(), key=str), ids=str)
def test_every_command_is_one(command: Command):
    program = Path(command.words[0]).name
    rest = list(command.words[1:])
    if program == "belayer":
        parse(rest, inline=command.inline)
    elif program == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif program in ("python", "python3", "bash") and rest[:2] == ["-m", "pytest"]:
        assert (ROOT / rest[2]).exists(), f"{rest[2]} is not there"
    elif program in ("python", "python3"):
        compile((ROOT / rest[0]).read_text(), rest[0], "exec")
    elif command.words[0].startswith(("scripts/", "benchmarks/")):
        assert os.access(ROOT / command.words[0], os.X_OK)
    else:
        assert program in FOREIGN, f"no rule covers {program}: add one here, or say in FOREIGN why none is needed"


def parse(words: list[str], *, inline: bool) -> None:
    """Let the command line's own parser read the very words. Inline, the mere name of a command will do."""
    words = ["train" if word == "COMMAND" else word for word in words]
    inner = app
    named = 0
    while named < len(words) and not words[named].startswith("-") and words[named] in set(inner):
        inner = inner[words[named]]
        named += 1
    assert named, f"belayer has no command {words[0]}"
    if named == len(words) and inline:
        return
    if "--help" not in words:
        app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quick start has been followed: the tiny model is made, its example has run."""
    place = tmp_path_factory.mktemp("newcomer")
    steps = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
sys.argv = ["tiny_model.py", "runs/tiny_model"]
runpy.run_path({str(ROOT / "examples/tiny_model.py")!r}, run_name="__main__")
runpy.run_path({str(ROOT / "examples/own_environment.py")!r}, run_name="__main__")
"""
    # what is tried is the path that a newcomer walks; shadows and images have tests of their own, and cost time
    env = os.environ | {"BELAYER_ENGINE__STANDBY": "none", "BELAYER_ENGINE__IMAGES": "false"}
    done = subprocess.run(
        [sys.executable, "-c", steps], cwd=place, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^r-[01]-[01] 0\.0 3 turns$", done.stdout, re.MULTILINE)) == 4, done.stdout
    return place


@pytest.fixture(scope="module")
def carried_out(finished: Path) -> dict[str, dict[str, Any]]:
    """What each line of `docs_runs.HERE` came to, carried out in that folder in the order of the table."""
    small = SMALL.replace("steps = 2", "steps = 1")
    assert small != SMALL
    (finished / "small.toml").write_text(small)
    for name in ("shell_task.py", "tiny_model.py"):
        shutil.copy(ROOT / "examples" / name, finished)
    lines = list(dict.fromkeys(line for line, _ in docs_runs.HERE.values()))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/docs_runs.py")],
        cwd=finished,
        input="\n".join(lines) + "\n",
        env=os.environ | {"COLUMNS": "150"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    told = {told["line"]: told for told in map(json.loads, done.stdout.splitlines())}
    assert told.keys() == set(lines), done.stdout + done.stderr
    return told


@pytest.mark.timeout(800)  # all lines are carried out before the first is judged: half a minute on a quiet machine
@needs_sandboxes
@needs_vllm
@pytest.mark.parametrize("command", docs_runs.HERE)
def test_a_command_does_what_it_is_there_for(carried_out: dict[str, dict[str, Any]], command: str) -> None:
    line, says = docs_runs.HERE[command]
    told = carried_out[line]
    assert told["code"] in (0, None) and says in told["out"], told["out"] or told["code"]


def as_written(command: Command) -> str:
    """A command as the tables of `docs_runs` know it, wherever it is called from."""
    return " ".join([Path(command.words[0]).name, *command.words[1:]])


def is_mere_name(command: Command) -> bool:
    """In the text: the name of a command of ours, without anything that one would type behind it."""
    if not command.inline:
        return False
    inner = app
    for word in command.words[1:]:
        if word not in set(inner):
            return False
        inner = inner[word]
    return True


def test_every_command_is_run_by_a_test_or_listed() -> None:
    tables = (docs_runs.HERE, docs_runs.ELSEWHERE, docs_runs.NOT_RUN)
    known = [command for table in tables for command in table]
    assert len(known) == len(set(known)), "a command is in two tables"
    written = {as_written(command) for command in COMMANDS if not is_mere_name(command)}
    assert written <= set(known), f"in no table of tests/docs_runs.py: {sorted(written - set(known))}"
    assert set(known) - written <= {as_written(command) for command in COMMANDS}, "no page has these any more"
    # names in the text are names of something that is run as well
    for name in {as_written(command) for command in COMMANDS} - written:
        assert any(f"{command} ".startswith(f"{name} ") for command in known), f"{name} is run nowhere"
    assert len(docs_runs.NOT_RUN) == 14, "count anew what no test runs"


@pytest.mark.parametrize("command", docs_runs.ELSEWHERE)
def test_what_runs_elsewhere_does(command: str) -> None:
    where, shown = docs_runs.ELSEWHERE[command]
    file, _, name = where.partition("::")
    source = (ROOT / file).read_text()
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1, f"{where} does not exist"
    text = ast.get_source_segment(source, found[0]) or ""
    assert all(part in text for part in shown), f"{where} does not run `{command}` any more"


def belayer(line: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "belayer.cli", *line.split()],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_line_of_doctor_is_explained(tmp_path: Path):
    found = json.loads(belayer("doctor --json", cwd=tmp_path).stdout)
    page = (ROOT / "docs/troubleshooting.md").read_text()
    explained = set(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))
    assert {item["name"] for item in found["capabilities"]} <= explained


# -- Python ------------------------------------------------------------------------------------------------------------
def test_python_is_typed_correctly(tmp_path: Path):
    """One run of pyright over all pieces, each with the names that its page has declared. Only our types count."""
    places = {}
    for number, block in enumerate(block for block in BLOCKS if block.language == "python"):
        file = tmp_path / f"piece_{number}.py"
        file.write_text(as_module(block))
        places[str(file)] = block
    assert len(places) >= 4
    for package in OTHERS:
        stub = tmp_path / "typings" / package / "__init__.pyi"
        stub.parent.mkdir(parents=True)
        stub.write_text("from typing import Any\ndef __getattr__(name: str) -> Any: ...\n")
    settings = {
        "typeCheckingMode": "basic",
        "reportMissingImports": "none",
        "reportOptionalMemberAccess": "none",
        "useLibraryCodeForTypes": False,
        "extraPaths": [str(ROOT / "examples")],
        "exclude": ["typings"],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(places)
    wrong = [
        f"{places[item['file']]}: {item['message']}"
        for item in found["generalDiagnostics"]
        if item["severity"] == "error" and not FORGIVEN.search(item["message"])
    ]
    assert not wrong, "\n".join(wrong)


def as_module(block: Block) -> str:
    """A whole program as it is; a piece of one as the body of a function that is given what it uses."""
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    if any(isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef) for node in tree.body):
        return block.text + "\n"
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used -= made | set(dir(builtins)) | {alias.split(".")[0] for alias in _imported(tree)}
    unknown = used - NAMES.keys() - {"Config", "Rollout", "Run"}
    assert not unknown, (
        f"{block}: nobody knows what {', '.join(sorted(unknown))} is; declare it, or add it to NAMES here"
    )
    given = ", ".join(f"{name}: {NAMES[name]}" for name in sorted(used & NAMES.keys()))
    return f"{PREAMBLE}\n\nasync def piece({given}) -> Any:\n{textwrap.indent(block.text, '    ')}\n"


def _imported(tree: ast.Module) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def test_the_quick_start_shows_its_example():
    source = (ROOT / "examples/own_environment.py").read_text().split('"""', 2)[2].strip()
    assert f"```python\n{source}\n```" in (ROOT / "docs/quickstart.md").read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 25


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=str)
def test_every_toml_is_a_configuration(block: Block):
    Config.model_validate(tomllib.loads(block.text))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_every_json_is_one(block: Block):
    json.loads(block.text)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("yaml", "yml")], ids=str)
def test_every_yaml_is_one_and_names_classes_that_exist(block: Block):
    assert yaml.safe_load(block.text)
    for module, name in re.findall(r"\b(belayer(?:\.[a-z_]+)+)[.:]([A-Z]\w+)", block.text):
        source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()  # its harness may not be here
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"{module} has no {name}"


def test_every_setting_that_is_named_exists():
    sections = {
        name: TrainConfig if name == "train" else field.annotation for name, field in Config.model_fields.items()
    }
    from belayer import Run
    from belayer.engine import Engine
    from belayer.sandbox import Sandbox

    attributes = {"run": Run, "engine": Engine, "sandbox": Sandbox}
    wrong = []
    for page in PAGES:
        for section, key in re.findall(rf"`({'|'.join(sections)})\.([a-z_]+)\b(?!\.)", page.read_text()):
            fields = getattr(sections[section], "model_fields", {})
            owner = attributes.get(section)
            known = key in fields or key in ("json", "md", "toml")
            known = known or (owner and (hasattr(owner, key) or f"self.{key}" in inspect.getsource(owner)))
            if not known:
                wrong.append(f"{page.relative_to(ROOT)}: {section}.{key}")
    assert not wrong, wrong
