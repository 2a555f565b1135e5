"""bfloat16 where it is exact: with vLLM on a processor whose products are our own kernel's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.backend_kit import BackendHost, outcomes, requests, spec_of
from tests.engine_kit import VOCABULARY, make_model

from belayer.config import EngineConfig
from belayer.engine._wire import Work
from belayer.engine.backends import bfloat16_kernel
from belayer.engine.exactness import is_exact
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(bool(bfloat16_kernel.unavailable()), reason=f"not exact here: {bfloat16_kernel.unavailable()}"),
]

LENGTH = 20


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendHost]:
    model = make_model(tmp_path_factory.mktemp("model") / "weights", seed=0)
    config = EngineConfig(model=model, dtype="bfloat16", max_model_len=448, max_num_seqs=4, kv_bytes=2 << 20)
    with RunLabel.new("test backends bfloat16") as label:
        host = BackendHost(spec_of(config), label)
        try:
            yield host
        finally:
            host.close()


def test_resumed_anywhere_and_in_any_company_it_is_the_same_completion(host: BackendHost) -> None:
    """To the last bit of the logprobs, as in float32; what was decoded is now prefilled, and beside other requests."""
    work = requests(5, LENGTH, VOCABULARY)
    whole = outcomes(work, host.ask("complete", work, 0))
    host.ask("warm_up")
    for position in range(LENGTH):
        host.ask("forget_prefixes")
        some = [item for index, item in enumerate(work) if (index + position) % 3 or index == position % 5]
        resumed = [Work(item.id, item.prompt_ids, whole[item.id].tokens[:position], item.sampling) for item in some]
        for key, one in outcomes(resumed, host.ask("complete", resumed, 0)).items():
            assert one.tokens == whole[key].tokens, (key, position)
            assert one.logprobs == whole[key].logprobs[position:], (key, position)


def test_only_where_it_holds(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=0)
    exact = EngineConfig(model=model, dtype="bfloat16")
    assert is_exact(exact)
    assert not is_exact(exact.model_copy(update={"batch_invariant": False}))
    assert not is_exact(exact.model_copy(update={"backend": "transformers"}))
    assert not is_exact(exact.model_copy(update={"dtype": "float16"}))
    assert is_exact(exact.model_copy(update={"dtype": "float32", "backend": "transformers"}))
