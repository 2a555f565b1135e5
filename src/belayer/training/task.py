"""What a training task must offer, and how the configuration's `file.py:Name` becomes one."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from belayer.errors import ConfigError

if TYPE_CHECKING:
    from belayer.rollout import Rollout, Tokenizer


class Task(Protocol):
    """Prompts, the rollout function and, if there is a warm start, its demonstrations."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def tasks(self, step: int, count: int, seed: int) -> list[Any]:
        """The JSON-able prompts of one optimiser step: a pure function of its arguments."""
        ...

    async def solve(self, rollout: Rollout) -> float:
        """One rollout; returns its reward. Deterministic given the rollout."""
        ...

    def warm_start_examples(self, seed: int) -> Iterable[tuple[list[int], list[int]]]:
        """Pairs of token ids and a mask that is 1 for the tokens to imitate. May be endless."""
        ...


def load_task(spec: str, base: Path) -> Task:
    """Make the task that `spec` (`file.py:Class`, relative to the folder `base`) names.

    Raises `ConfigError` if the file, the name or a part of the task is missing.
    """
    made = load_object(spec, base, key="train.task")()
    missing = [name for name in ("tokenizer", "tasks", "solve") if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"train.task: `{spec}` has no {', '.join(f'`{name}`' for name in missing)}")
    return made


def load_object(spec: str, base: Path, *, key: str) -> Any:
    """The object that `spec` (`file.py:name`) names; the file may import its neighbours. `key` is for the errors."""
    file, _, name = spec.partition(":")
    if not file or not name:
        raise ConfigError(f"{key} must look like `file.py:name`, not {spec!r}")
    path = (base / file).resolve()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}")
    module = _load_module(path, key)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        raise ConfigError(f"{key}: {path} defines no `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""))
    return getattr(module, name)


def source_digest(spec: str, base: Path) -> str:
    """Digest of every Python file beside the one that `spec` names: any of them may be imported by it."""
    digest = hashlib.sha256()
    for path in sorted((base / spec.partition(":")[0]).resolve().parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _load_module(path: Path, key: str) -> ModuleType:
    # Under its plain name, so that a neighbour that imports it gets the same module and not a second one.
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None:
        raise ConfigError(f"{key}: a module named `{path.stem}` is loaded already; rename {path.name}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]
        if isinstance(error, Exception):
            raise ConfigError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
        raise
    return module
