"""The starting policy: given or built, warmed up, cached, and kept by the run that has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belayer.config import TrainConfig
from belayer.errors import ConfigError
from belayer.training import load_task, prepare_model

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[2] / "examples"

BUILDER = """
from pathlib import Path

def build(folder, seed):
    folder.mkdir()
    (folder / "config.json").write_text(f"seed {seed}")
    with (Path(__file__).parent / "built.log").open("a") as log:
        log.write(f"{seed}\\n")
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a builder that logs its calls, and an empty cache."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("BELAYER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "odd_builder.py").write_text(BUILDER)
    yield folder
    for name in ("odd_builder", "odd_tiny"):
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]


def prepare(base: Path, state: str, *, seed: int = 1, task: Any = None, **changes: Any) -> Path:
    config = TrainConfig(**{"task": "odd_builder.py:X", "model": "odd_builder.py:build", **changes})
    return prepare_model(config, task or SimpleNamespace(), base.parent / state, seed, lambda text: None, base=base)


def built(base: Path) -> list[str]:
    return (base / "built.log").read_text().split()


def test_a_model_is_built_once_per_seed_and_source(base: Path) -> None:
    first = prepare(base, "run-1")
    assert first == base.parent / "run-1" / "model" and (first / "config.json").read_text() == "seed 1"
    assert (prepare(base, "run-2") / "config.json").read_text() == "seed 1"
    assert built(base) == ["1"], "the second run takes it from the cache"
    assert (prepare(base, "run-3", seed=2) / "config.json").read_text() == "seed 2"
    prepare(base, "run-4", learning_rate=1e-5)
    assert built(base) == ["1", "2"], "the cache depends on what makes the model and on nothing else"
    (base / "neighbour.py").write_text("value = 1\n")
    prepare(base, "run-5")
    assert built(base) == ["1", "2", "1"]


def test_a_run_keeps_its_model(base: Path) -> None:
    model = prepare(base, "run")
    (model / "config.json").write_text("mine")
    assert (prepare(base, "run", seed=9) / "config.json").read_text() == "mine"


def test_a_kill_leaves_no_half_of_a_model(base: Path) -> None:
    unfinished = base.parent / "run" / "model.123.unfinished"
    unfinished.mkdir(parents=True)
    prepare(base, "run")
    assert [one.name for one in (base.parent / "run").iterdir()] == ["model"]


def test_a_build_that_fails_leaves_nothing_in_the_cache(base: Path) -> None:
    (base / "odd_builder.py").write_text(BUILDER + "    raise OSError('no')\n")
    with pytest.raises(OSError, match="no"):
        prepare(base, "run")
    assert [one.name for one in (base.parent / "cache" / "models").iterdir()] == ["lock"]
    assert not (base.parent / "run" / "model").exists()


def test_a_folder_is_taken_as_it_is(base: Path) -> None:
    (base / "mine").mkdir()
    (base / "mine" / "config.json").write_text("{}")
    assert (prepare(base, "run", model="mine") / "config.json").read_text() == "{}"
    assert not (base / "built.log").exists()


@pytest.mark.parametrize("model", ["", "nowhere", "odd_builder.py"])
def test_what_is_no_model_is_named(base: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.model"):
        prepare(base, "run", model=model)


def test_a_warm_start_needs_demonstrations(base: Path) -> None:
    with pytest.raises(ConfigError, match="no `warm_start_examples`"):
        prepare(base, "run", warm_start_steps=3)
    few = SimpleNamespace(warm_start_examples=lambda seed: [([1, 2], [0, 1])] * 10)
    build = f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nfrom tiny_model import build\n"
    (base / "odd_tiny.py").write_text(build)
    with pytest.raises(ConfigError, match="ran out after 2 of 3"):
        prepare(base, "run", model="odd_tiny.py:build", warm_start_steps=3, warm_start_batch=4, task=few)


def test_the_warm_start_imitates_and_repeats_itself_exactly(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from belayer.training._torch import collate, token_logprobs

    task: Any = load_task("shell_task.py:ShellTask", EXAMPLES)
    config = TrainConfig(
        task="shell_task.py:ShellTask", model="tiny_model.py:build", warm_start_steps=12, warm_start_batch=8
    )
    said: list[str] = []

    def losses_and_bytes(name: str, steps: int) -> tuple[float, bytes]:
        monkeypatch.setenv("BELAYER_CACHE", str(base.parent / name))
        now = config.model_copy(update={"warm_start_steps": steps})
        folder = prepare_model(now, task, base.parent / f"state {name}", 1, said.append, base=EXAMPLES)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        examples = [pair for pair, _ in zip(task.warm_start_examples(99), range(16), strict=False)]
        ids, mask = collate([one[0] for one in examples], [one[1] for one in examples])
        with torch.no_grad():
            loss = float(-(token_logprobs(model, ids) * mask).sum() / mask.sum())
        return loss, (folder / "model.safetensors").read_bytes()

    before, _ = losses_and_bytes("one", 0)
    after, first = losses_and_bytes("two", 12)
    _, second = losses_and_bytes("three", 12)
    assert after < 0.8 * before
    assert first == second
    assert said[-1] == "warm start: 12 of 12 supervised steps"
