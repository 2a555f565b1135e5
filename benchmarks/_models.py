"""Model folders with random weights, written once below the cache folder. Which models: workloads/."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from belayer.ownership import cache_dir


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A Qwen3 model's shapes, and how much of an engine it gets. The head is not tied to the embedding."""

    dtype: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    positions: int
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    max_tokens: int

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def folder(self) -> Path:
        shapes = (self.vocabulary, self.hidden, self.layers, self.heads, self.kv_heads, self.head_dim, self.inner)
        return cache_dir() / "models" / f"bench-{'-'.join(map(str, shapes))}-{self.positions}-{self.dtype}"


def folder(model: Model) -> Path:
    """The model's folder, made at first use. The weights are the same wherever they are made."""
    path = model.folder
    if path.is_dir():
        return path
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": model.dtype,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix="unfinished-"))
    try:
        (unfinished / "config.json").write_text(json.dumps(config))
        save_file(dict(weights(model)), unfinished / "model.safetensors")
        unfinished.rename(path)
    except OSError:
        if not path.is_dir():  # nobody else made it meanwhile either
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def weights(model: Model, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors by name; other seeds give models that say other things."""
    source = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, model.dtype)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn((rows, columns), generator=source) / math.sqrt(columns)).to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", matrix(model.vocabulary, hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", matrix(queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", ones(model.head_dim)
        yield f"{prefix}.self_attn.k_norm.weight", ones(model.head_dim)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(model.inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(model.inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, model.inner)
        yield f"{prefix}.input_layernorm.weight", ones(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", ones(hidden)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", matrix(model.vocabulary, hidden)
