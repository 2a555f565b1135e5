"""What the engine's tests share: a tiny model made on the spot, requests, and a sink that keeps what it is given."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest, Sampling, TokenChunk
from belayer.engine.prebuild import build_image
from belayer.ownership import RunLabel

VOCABULARY = 1000  # not a multiple of 64: vLLM pads it


def make_model(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A Qwen3 model folder with random float32 weights, small enough to write in milliseconds."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(random_weights(tied=tied, seed=seed)), folder / "model.safetensors")
    return folder


def byte_tokenizer(size: int) -> Any:
    """A tokenizer of `size` tokens: every byte by its own number, then pairs of letters, then "<|end|>"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}  # GPT-2 writes the others from U+0100 on
    rest = itertools.count(256)
    spelt = [chr(byte if byte in printable else next(rest)) for byte in range(256)]
    letters = [spelt[byte] for byte in b"abcdefghijklmnopqrstuvwxyz \n.,-"]
    pairs = list(itertools.product(letters, letters))[: size - 257]
    vocabulary = {piece: number for number, piece in enumerate([*spelt, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def random_weights(*, tied: bool = False, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors by name. Different seeds give models that say different things."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source) * 0.1

    yield "model.embed_tokens.weight", normal(VOCABULARY, 128)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", normal(128, 128)
        yield f"{prefix}.self_attn.k_proj.weight", normal(64, 128)
        yield f"{prefix}.self_attn.v_proj.weight", normal(64, 128)
        yield f"{prefix}.self_attn.o_proj.weight", normal(128, 128)
        yield f"{prefix}.self_attn.q_norm.weight", 1 + normal(32)
        yield f"{prefix}.self_attn.k_norm.weight", 1 + normal(32)
        yield f"{prefix}.mlp.gate_proj.weight", normal(256, 128)
        yield f"{prefix}.mlp.up_proj.weight", normal(256, 128)
        yield f"{prefix}.mlp.down_proj.weight", normal(128, 256)
        yield f"{prefix}.input_layernorm.weight", 1 + normal(128)
        yield f"{prefix}.post_attention_layernorm.weight", 1 + normal(128)
    yield "model.norm.weight", 1 + normal(128)
    if not tied:
        yield "lm_head.weight", normal(VOCABULARY, 128)


KEYED = {"backend", "dtype", "device", "max_model_len", "max_num_seqs", "kv_bytes", "batch_invariant", "threads"}
KEYED |= {"adopt_sealed_blocks"}


def engine_config(model: Path, **changes: Any) -> EngineConfig:
    """An engine that starts its workers from an image, in a second, where the suite has one for these settings.

    A test that is about images, or about workers that are started without one, says so with `images=`.
    """
    settings: dict[str, Any] = {
        "model": model,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_bytes": 32 << 20,
        "hang_s": 1.5,
    }
    if "images" not in changes:
        file = model / "config.json"
        settings["images"] = file.is_file() and not KEYED & changes.keys() and has_image(file.read_text())
    return EngineConfig(**(settings | changes))


@functools.cache
def has_image(model_config: str) -> bool:
    """Whether engines with the settings above can start from an image; it is built, once, if there is none yet.

    Only for the untied model: what few tests use is not worth an image.
    """
    found: list[bool] = []

    async def build(folder: Path) -> None:
        model = make_model(folder / "model")
        if (model / "config.json").read_text() != model_config:
            found.append(False)
            return
        with RunLabel.new("test engine image") as label:
            reason = await build_image(engine_config(model, images=True), label)
        found.append(not reason)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(build(Path(folder)))

    # a thread of its own: tests ask for a configuration inside an event loop too
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def requests(count: int, max_tokens: int = 40, *, tag: str = "r") -> list[GenerationRequest]:
    """Greedy and sampled ones, of different lengths; the longest span several KV blocks and attention tiles."""
    kinds = (
        Sampling(max_tokens=max_tokens, temperature=0.0),
        Sampling(max_tokens=max_tokens, seed=11),
        Sampling(max_tokens=max_tokens, seed=12, temperature=0.7, top_k=40, top_p=0.9),
        Sampling(max_tokens=max_tokens, seed=13, temperature=1.3, min_p=0.02),
    )
    return [
        GenerationRequest(
            id=f"{tag}{i}",
            prompt_ids=[(7 * j + 31 * i) % VOCABULARY for j in range(20 + 110 * i)],
            sampling=kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


class Journal:
    """A sink that keeps tokens as a journal would, and refuses gaps and repetitions."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.versions: dict[str, list[int]] = {}
        self.after: Callable[[], None] | None = None

    def __call__(self, chunk: TokenChunk) -> None:
        tokens = self.tokens.setdefault(chunk.request_id, [])
        assert chunk.start == len(tokens), f"{chunk.request_id}: chunk at {chunk.start}, journal at {len(tokens)}"
        assert len(chunk.token_ids) == len(chunk.logprobs)
        tokens += chunk.token_ids
        self.logprobs.setdefault(chunk.request_id, []).extend(chunk.logprobs)
        self.versions.setdefault(chunk.request_id, []).extend([chunk.weights_version] * len(chunk.token_ids))
        if self.after is not None:
            self.after()

    def when_all_have(self, count: int, of: int, action: Callable[[], None]) -> None:
        """Call `action` once, inside the sink, when `of` requests have `count` tokens."""

        def check() -> None:
            if len(self.tokens) == of and min(len(t) for t in self.tokens.values()) >= count:
                self.after = None
                action()

        self.after = check


async def complete(engine: Engine, work: list[GenerationRequest], journal: Journal | None = None) -> Journal:
    """Run all requests at once; every one must end."""
    journal = journal or Journal()
    await asyncio.gather(*(engine.generate(request, journal) for request in work))
    return journal
