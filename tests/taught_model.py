"""Models that have learned to say one thing, so small and so quickly taught that a test can make them.

What an untrained model says is noise, and no harness acts on noise. These are real models with real weights: they are
taught a few conversations by ordinary gradient descent, in seconds, until they say what they were shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Lesson = tuple[list[int], list[bool]]  # a whole conversation in tokens, and which of them the model is to say


def teach(model: Any, lessons: Sequence[Lesson], *, enough: float, steps: int = 400) -> float:
    """Teach `model` (a transformers causal LM) until the mean loss of its tokens is below `enough`; returns that loss.

    Lessons that begin alike and differ later are learned as alternatives: their loss cannot fall below the entropy.
    """
    longest = max(len(ids) for ids, _ in lessons)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in lessons])
    here = torch.tensor([[True] * len(tokens) + [False] * (longest - len(tokens)) for tokens, _ in lessons])
    said = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in lessons])
    labels = ids.masked_fill(~said, -100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    loss = float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so little more threads only wait for each other
    for _ in range(steps):
        out = model(input_ids=ids, attention_mask=here.long(), labels=labels)
        loss = out.loss.item()
        if loss < enough:
            torch.set_num_threads(threads)
            return loss
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
    raise AssertionError(f"the model has not learned its lessons: loss {loss:.3f} after {steps} steps")


def lesson(text: str, said: re.Pattern[str], encode: Any) -> Lesson:
    """A conversation as text; `said` matches each turn of the model, its end included."""
    ids: list[int] = []
    mask: list[bool] = []
    at = 0
    for turn in said.finditer(text):
        for piece, learn in ((text[at : turn.start()], False), (turn[0], True)):
            tokens = encode(piece)
            ids += tokens
            mask += [learn] * len(tokens)
        at = turn.end()
    return ids, mask


def tokenizer_of(texts: Iterable[str], special: Sequence[str], size: int) -> Any:
    """A tokenizer of exactly `size` tokens: bytes, pieces of `texts` as long as they come, and the `special` ones.

    No token spans a special one, so text between two of them is the same tokens wherever it stands.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    between = re.compile("|".join(map(re.escape, special)))
    pieces = [piece for text in texts for piece in between.split(text)]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(pieces, trainer)
    missing = size - len(special) - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused {number}>" for number in range(missing)])
    return tokenizer


# -- a model that calls tools ------------------------------------------------------------------------------------------
SAID = re.compile(r"(?<=<\|im_start\|>assistant\n)(?!<\|im_start\|>).*?<\|im_end\|>", re.DOTALL)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<tool_call>", "</tool_call>"]
SIZE = 1200


def make_tool_caller(folder: Path, conversations: Iterable[list[dict[str, Any]]], tools: list[Any]) -> None:
    """Write a Qwen3 folder whose model has learned `conversations` with `tools`, in the chat template of Qwen 2.5."""
    import trl
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

    template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    schemas: list[Any] = [get_json_schema(tool) for tool in tools]
    texts, _ = render_jinja_template(list(conversations), tools=schemas, chat_template=template)
    bare = tokenizer_of(texts, SPECIAL, SIZE)
    bare.add_tokens(SPECIAL[3:])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        chat_template=template,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        teach(model, [lesson(text, SAID, tokenizer.encode) for text in texts], enough=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -- a model that writes commands as text ------------------------------------------------------------------------------
ROLES = ("system", "user", "assistant")
PLAIN = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAID_PLAINLY = re.compile(r"(?<=<\|assistant\|>).*?<\|end\|>", re.DOTALL)


def teach_text(folder: Path, conversations: Sequence[list[dict[str, str]]]) -> None:
    """Make the untrained model in `folder` (see `engine_kit.make_model`) one that has learned `conversations`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    special = ["<|end|>", *(f"<|{role}|>" for role in ROLES)]
    config = Qwen3Config.from_pretrained(folder)
    texts = ["".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in each) for each in conversations]
    # what the model says stays bytes: a turn of few tokens could not be interrupted
    told = [m["content"] for each in conversations for m in each if m["role"] != "assistant"]
    tokenizer = tokenizer_of(told, special, config.vocab_size)
    tokenizer.add_special_tokens(special)
    assert tokenizer.get_vocab_size() == config.vocab_size
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype="float32")
    teach(
        model, [lesson(text, SAID_PLAINLY, lambda piece: tokenizer.encode(piece).ids) for text in texts], enough=0.012
    )
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": PLAIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
