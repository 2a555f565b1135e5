"""Starting: what cannot work is refused early and clearly; without a shadow a dead worker is replaced from cold."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tests.engine_kit import Journal, complete, engine_config, make_model, random_weights, requests

from belayer import events as ev
from belayer.engine import Engine
from belayer.errors import ConfigError, EngineError, EngineUnavailable, WeightsError
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

COUNT = 3


def start_and_close(model: Path, **changes: object) -> None:
    async def scenario() -> None:
        with RunLabel.new("test engine start") as label:
            engine = await Engine.start(engine_config(model, images=False, **changes), label)
            await engine.close()

    asyncio.run(scenario())


def edit(model: Path, **changes: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_bad_model_folders_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        start_and_close(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        start_and_close(tmp_path / "empty")
    model = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"engine\.dtype is bfloat16"):
        start_and_close(model, dtype="bfloat16")
    with pytest.raises(ConfigError, match="1024 positions"):
        start_and_close(model, max_model_len=2048)
    edit(model, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantised"):
        start_and_close(model)
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        start_and_close(model)
    (model / "config.json").unlink()
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        start_and_close(model)


@pytest.mark.timeout(600)
def test_a_model_with_a_tensor_missing_fails_with_its_name_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    tensors = {name: tensor for name, tensor in random_weights() if name != "model.layers.1.mlp.down_proj.weight"}
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(EngineUnavailable, match=r"layers\.1\.mlp\.down_proj"):
        start_and_close(model)


@pytest.mark.timeout(600)
def test_tied_model_given_weights_and_no_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head, weights that replace the checkpoint's at the start, cold starts that keep them; no file is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))  # the workers'; this process has looked at it before
    model = make_model(tmp_path / "model", tied=True)
    given = list(random_weights(tied=True, seed=5))
    saved = make_model(tmp_path / "given", tied=True, seed=5)
    events: list[ev.Event] = []

    async def tokens_of(path: Path, **options: object) -> tuple[Journal, Engine | None]:
        with RunLabel.new("test engine start") as label:
            engine = await Engine.start(engine_config(path, standby="none"), label, events=events.append, **options)  # type: ignore[arg-type]
            try:
                journal = await complete(engine, requests(COUNT))
                if options:
                    await with_faults(engine, journal)
                assert not list(label.dir.glob("rendezvous-*"))
            finally:
                await engine.close()
        return journal, engine

    async def with_faults(engine: Engine, reference: Journal) -> None:
        assert engine.policy_version == 41 and engine.shadow_pid is None
        assert set(reference.versions["r0"]) == {41}
        with pytest.raises(EngineError, match="no shadow"):
            await engine.wait_standby(1)
        journal = Journal()

        def kill() -> None:
            assert engine.worker_pid
            os.kill(engine.worker_pid, signal.SIGKILL)

        journal.when_all_have(11, COUNT, kill)
        await complete(engine, requests(COUNT), journal)
        assert journal.tokens == reference.tokens and journal.logprobs == reference.logprobs
        assert any(e.kind == ev.RECOVERED and e.data["how"] == "cold start" for e in events)
        # a tied head cannot be set apart from the embedding
        name, head = "lm_head.weight", next(t for n, t in random_weights(seed=9) if n == "lm_head.weight")
        with pytest.raises(WeightsError, match="lm_head"):
            await engine.update_weights([(name, head)], 42)
        assert (await complete(engine, requests(COUNT))).tokens == reference.tokens
        # the same weights under the names of a state dict, head included
        await engine.update_weights([*given, (name, dict(given)["model.embed_tokens.weight"])], 43)
        assert (await complete(engine, requests(COUNT))).tokens == reference.tokens

    async def scenario() -> None:
        direct, _ = await tokens_of(saved)
        replaced, engine = await tokens_of(model, weights=given, policy_version=41)
        assert replaced.tokens == direct.tokens and replaced.logprobs == direct.logprobs
        assert engine is not None
        with pytest.raises(EngineUnavailable):
            await engine.generate(requests(1)[0], Journal())
        await engine.close()

    asyncio.run(scenario())
    assert not list(temporary.glob("vllm_dist_*"))
