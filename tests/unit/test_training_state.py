"""Saved states of the trainer: which count, and what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer.training import TrainingError, newest_state
from belayer.training.state import mark_complete, remove_unfinished, weights_digest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.unit


def save(folder: Path, step: int, *, whole: bool = True) -> Path:
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"x")
    if whole:
        mark_complete(made, step, f"digest {step}")
    return made


def test_the_newest_whole_state_counts(tmp_path: Path) -> None:
    assert newest_state(tmp_path) is None
    for step in (2, 9, 10):  # 10 sorts before 2 and 9 as text
        save(tmp_path, step)
    unfinished = save(tmp_path, 11, whole=False)
    (unfinished / "complete.json.tmp").write_text("{")
    found = newest_state(tmp_path)
    assert found is not None
    assert (found.step, found.folder, found.weights_digest) == (10, tmp_path / "checkpoint-10", "digest 10")
    remove_unfinished(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-2", "checkpoint-9"]


def test_a_state_that_was_never_written_is_not_marked(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="step 3 was not saved"):
        mark_complete(tmp_path / "checkpoint-3", 3, "x")


def test_the_tensors_come_back_under_their_names(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    folder = save(tmp_path, 1, whole=False)
    safetensors.save_file(tensors, folder / "model.safetensors")
    mark_complete(folder, 1, weights_digest(iter(tensors.items())))
    state = newest_state(tmp_path)
    assert state is not None
    found = dict(state.weights())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert weights_digest(state.weights()) == state.weights_digest


def test_the_digest_sees_every_bit_name_shape_and_type() -> None:
    def digest(**tensors) -> str:
        return weights_digest(iter(tensors.items()))

    base = torch.arange(6.0)
    same = digest(a=base, b=base)
    assert digest(b=base.clone(), a=base.clone()) == same, "neither order nor memory matters"
    assert digest(a=base.reshape(3, 2).T.contiguous().T.reshape(6), b=base) == same
    changed = base.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    others = [
        digest(a=changed, b=base), digest(a=base, c=base), digest(a=base.reshape(2, 3), b=base),
        digest(a=base.to(torch.float64), b=base), digest(a=-0.0 * base, b=base), digest(a=base),
    ]  # fmt: skip
    assert len({same, *others}) == len(others) + 1
