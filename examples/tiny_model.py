"""Makes the model of the example: a Qwen3 of about 100,000 parameters with one token per character.

It is written as an ordinary Hugging Face folder (config.json, model.safetensors, tokenizer.json), so that any engine
loads it like a large one.
"""

from __future__ import annotations

from pathlib import Path

from shell_task import CharTokenizer


def build(folder: Path, seed: int) -> None:
    """Write a freshly initialised model and its tokenizer into `folder`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    characters = CharTokenizer()
    config = Qwen3Config(
        vocab_size=len(characters.vocabulary),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=characters.eos_id,
        pad_token_id=characters.pad_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    _tokenizer(characters).save_pretrained(folder)


def _tokenizer(characters: CharTokenizer):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {piece: index for index, piece in enumerate(characters.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?")


if __name__ == "__main__":
    import sys

    build(Path(sys.argv[1]), seed=0)
