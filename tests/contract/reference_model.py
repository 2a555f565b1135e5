"""Qwen3 in forty lines of float32 PyTorch, without cache or batch: what the backends are compared with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Of every position of `tokens`: float32 [len(tokens), vocabulary]."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        frequencies = config["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(len(tokens)).float(), frequencies).repeat(1, 2)[:, None]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    hidden = weights["model.embed_tokens.weight"][tokens]
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        x = norm(hidden, f"{name}.input_layernorm.weight")
        query, key, value = (
            (x @ weights[f"{name}.self_attn.{part}_proj.weight"].T).view(len(tokens), -1, size) for part in "qkv"
        )
        query = rotate(norm(query, f"{name}.self_attn.q_norm.weight"))
        key = rotate(norm(key, f"{name}.self_attn.k_norm.weight")).repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
        hidden = hidden + seen.flatten(1) @ weights[f"{name}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{name}.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(x @ weights[f"{name}.mlp.gate_proj.weight"].T)
        hidden = (
            hidden + (gate * (x @ weights[f"{name}.mlp.up_proj.weight"].T)) @ weights[f"{name}.mlp.down_proj.weight"].T
        )
    return norm(hidden, "model.norm.weight") @ weights["lm_head.weight"].T
