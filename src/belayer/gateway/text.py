"""Text: from prompts and messages to token ids, and from a completion's tokens back."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from belayer.engine import Sampling
from belayer.engine.stopping import Pieces, completed, load_tokenizer
from belayer.errors import RequestRefused
from belayer.gateway.problems import Problem, bad

_RESERVED = {
    "conversations",
    "tools",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
_THREADS = 2  # that tokenise at a time
_AT_ONCE = 8192  # characters that are tokenised faster than a thread is asked
_ROOM = 4  # times as many characters as the longest entries could spell: normalisers take some away
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Text:
    """The tokenizer of a model folder, its chat template and its end-of-sequence tokens, as far as it has them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.why_not = "none was given (--tokenizer FOLDER)"
        self._tokenizer: Any = None
        if folder is not None:
            try:
                self._tokenizer = load_tokenizer(folder)
            except RequestRefused as error:
                self.why_not = error.what.removeprefix("stop strings need a tokenizer, and ")
        self.eos = _ends(folder, self._tokenizer) if folder is not None else frozenset()
        self.special = frozenset(_special(self._tokenizer))
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1) if self.there else 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self.spell = functools.lru_cache(maxsize=65536)(self._spell)
        self._template, self._names = _chat_template(folder) if folder is not None else ("", {})

    @property
    def there(self) -> bool:
        return self._tokenizer is not None

    def need(self, what: str, param: str | None = None) -> Any:
        """The `tokenizers.Tokenizer`; a `Problem` that says what it was needed for, where there is none."""
        if self._tokenizer is None:
            raise bad(f"{what} needs a tokenizer: {self.why_not}; send token ids instead", param, "no_tokenizer")
        return self._tokenizer

    async def encode(
        self, texts: Sequence[str], max_model_len: int, *, special: bool, param: str = "prompt"
    ) -> list[list[int]]:
        """The token ids of each of `texts`. Long ones are tokenised in a thread, and the event loop goes on meanwhile.

        Raises `Problem` without tokenising for a text that is certainly longer than `max_model_len` tokens.
        """
        tokenizer = self.need("text", param)
        most = _ROOM * self._longest * max_model_len
        for text in texts:
            if len(text) > most:
                raise Problem(
                    400,
                    f"this model's context length is {max_model_len} tokens; {param} has {len(text)} characters, which "
                    f"cannot fit: {most} are the most",
                    param=param,
                    code="context_length_exceeded",
                )
            if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
                raise bad(f"{param} is not Unicode text: it holds half a surrogate pair", param)

        def work() -> list[list[int]]:
            # of the ways to encode, the one that lets other threads of Python run
            return [list(made.ids) for made in tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]

        if sum(map(len, texts)) <= _AT_ONCE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.need("text").decode(list(ids), skip_special_tokens=skip_special)

    def _spell(self, token: int) -> str:
        """One token by itself; `token_id:N` where there is no tokenizer."""
        return self._tokenizer.decode([token], skip_special_tokens=False) if self.there else f"token_id:{token}"

    async def chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], **how: Any) -> str:
        """Render `messages` with the folder's chat template. A `Problem` where it has none or the template refuses."""
        if reserved := sorted(_RESERVED & kwargs.keys()):
            raise bad(f"chat_template_kwargs must not hold {reserved[0]}", "chat_template_kwargs")
        self.need("chat", "messages")
        if not self._template:
            raise bad(
                "the model folder has no chat template: save one there (chat_template.jinja), or use /v1/completions",
                "messages",
                "no_chat_template",
            )
        # what a tokenizer's apply_chat_template calls; a tokenizer object would bring torch into this process
        names = {**self._names, **kwargs}
        render = functools.partial(_render, [messages], chat_template=self._template, **how, **names)
        try:
            return await asyncio.to_thread(render)
        except Exception as error:  # templates raise whatever they like about messages they do not understand
            why = f"{type(error).__name__}: {error}"
            raise bad(f"the chat template refuses these messages: {why}", "messages") from None

    def stream(self, prompt_ids: Sequence[int], sampling: Sampling, hidden: frozenset[int], keep: bool) -> TextStream:
        """The text of a completion of `prompt_ids`, see `TextStream`."""
        pieces = Pieces(self._tokenizer, prompt_ids) if self.there else None
        return TextStream(pieces, sampling.stop, hidden, keep, sampling.min_tokens)


class TextStream:
    """The text of one completion, released as soon as no stop string can begin in it any more.

    Tokens in `hidden` (special ones, the stop token) take part in stop strings and are not shown. A stop string that
    was found ends the text before it, or after it with `keep`; the first `min_tokens` tokens complete none. The pieces
    of a stream are the text of a whole answer.
    """

    def __init__(
        self, pieces: Pieces | None, stops: tuple[str, ...], hidden: frozenset[int], keep: bool, min_tokens: int = 0
    ) -> None:
        self._pieces = pieces
        self._stops = stops
        self._hidden = hidden
        self._keep = keep
        self._room = max(map(len, stops), default=1) - 1
        self._held = ""  # not released yet, hidden characters included
        self._shown: list[bool] = []  # which characters of it are to be shown
        self._cut: int | None = None
        self._too_early = min_tokens
        self.matched: str | None = None

    def feed(self, ids: Iterable[int]) -> str:
        """`ids` follow; returns what of the text is certain by now."""
        if self._pieces is None:
            return ""
        out: list[str] = []
        for token in ids:
            piece = self._pieces.step(token)
            begin = len(self._held)
            self._held += piece
            self._shown += [token not in self._hidden] * len(piece)
            if self._too_early > 0:
                self._too_early -= 1
            elif self._stops and self._cut is None:
                self._look(begin)
            if self._cut is None:
                out.append(self._release(len(self._held) - self._room))
        return "".join(out)

    def end(self) -> str:
        """The rest of the text, when the completion is complete."""
        return self._release(len(self._held) if self._cut is None else self._cut)

    def _look(self, begin: int) -> None:
        if found := completed(self._stops, self._held, begin):
            at, self.matched = min(found)
            self._cut = at + len(self.matched) if self._keep else at

    def _release(self, count: int) -> str:
        if count <= 0:
            return ""
        text = "".join(char for char, shown in zip(self._held[:count], self._shown, strict=False) if shown)
        self._held, self._shown = self._held[count:], self._shown[count:]
        return text


def _render(conversations: list[Any], **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(conversations, **kwargs)
    return rendered[0][0]


def _chat_template(folder: Path) -> tuple[str, dict[str, str]]:
    """The folder's chat template, "" if it has none, and the special tokens that templates may name."""
    config = _json(folder / "tokenizer_config.json")
    names = {key: _spelt(config.get(key)) for key in _NAMES}
    try:
        template: Any = (folder / "chat_template.jinja").read_text()
    except OSError:
        template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((item.get("template") for item in template if item.get("name") == "default"), "")
    return template if isinstance(template, str) else "", {key: value for key, value in names.items() if value}


def _spelt(token: Any) -> str:
    spelt = token.get("content") if isinstance(token, dict) else token
    return spelt if isinstance(spelt, str) else ""


def _special(tokenizer: Any) -> Iterable[int]:
    if tokenizer is None:
        return ()
    return [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]


def _ends(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a sequence, by the folder's files: what a completion stops at unless told otherwise."""
    found: set[int] = set()
    spelt = _spelt(_json(folder / "tokenizer_config.json").get("eos_token"))
    if tokenizer is not None and (number := tokenizer.token_to_id(spelt)) is not None:
        found.add(number)
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        found.update(item for item in (ids if isinstance(ids, list) else [ids]) if type(item) is int and item >= 0)
        if found:
            break
    return frozenset(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
