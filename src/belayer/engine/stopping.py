"""Why a completion ends: stop tokens, stop strings, its budget. Everything that the driver decides about it.

The engine knows token ids only, so stop strings are looked for here: the completion's ids become text one by one, with
the model folder's tokenizer. What is found is a function of prompt and completion and of nothing else. A resumed
completion is therefore fed its journalled tokens first, and a stop string that a worker's death cut in two is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from belayer._shielded import shielded
from belayer.engine.request import GenerationRequest
from belayer.errors import RequestRefused

CONTEXT = 16  # tokens of the prompt that decide how the first token of the completion is spelt (a leading space)
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class Pieces:
    """The text of one completion, token by token; special tokens are written out."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`; the end of the prompt decides how the first token is spelt."""
        self._tokenizer = tokenizer
        self._stream = _stream(list(prompt_ids[-CONTEXT:]))

    def step(self, token: int) -> str:
        """What `token` adds to the text: nothing in the middle of a character."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            # some tokenizers decode a byte sequence that is no text into something else once more of it is there,
            # and the stream loses its place: it starts again with this token
            if not str(error).startswith("Invalid prefix"):
                raise
            self._stream = _stream([])
            return self._stream.step(self._tokenizer, token) or ""


class StopWatch:
    """Looks for the stop strings of one completion while it grows."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], strings: Iterable[str], min_tokens: int = 0) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`. The first `min_tokens` tokens complete no stop string."""
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings))
        self._text = ""  # the end of the completion's text, as long as a stop string's beginning could be
        self._too_early = min_tokens
        self._pieces = Pieces(tokenizer, prompt_ids)

    def feed(self, ids: Iterable[int]) -> int | None:
        """`ids` follow in the completion. Returns the index among them of the token that completes a stop string."""
        for index, token in enumerate(ids):
            begin = len(self._text)
            self._text += self._pieces.step(token)
            if self._too_early > 0:
                self._too_early -= 1
            elif completed(self._strings, self._text, begin):
                return index
            self._text = self._text[1 - self._longest :] if self._longest > 1 else ""
        return None


def completed(strings: Iterable[str], text: str, begin: int) -> list[tuple[int, str]]:
    """Which of `strings` end behind `begin` in `text`, and where each of them begins."""
    found = [(text.find(string, max(0, begin - len(string) + 1)), string) for string in strings]
    return [(at, string) for at, string in found if at >= 0]


class Stopping:
    """Makes stop watches for one model; loads its tokenizer when the first request with a stop string comes."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._loading: asyncio.Future[Any] | None = None

    async def watch(self, request: GenerationRequest) -> StopWatch | None:
        """A watch for `request`, or None if it has no stop string. Raises `RequestRefused` without a tokenizer."""
        if not request.sampling.stop:
            return None
        loading = self._loading
        if loading is None or (loading.done() and loading.exception() is not None):  # it may be there by now
            loading = self._loading = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, self._model))
        # a caller that gives up must not take the tokenizer from the others
        tokenizer, sampling = await shielded(loading), request.sampling
        return StopWatch(tokenizer, request.prompt_ids, sampling.stop, sampling.min_tokens)


def already_finished(request: GenerationRequest, watch: StopWatch | None) -> str | None:
    """Why a resumed completion is complete, or None. `watch` is fed what is there already."""
    resumed = request.resume_ids
    if watch is not None and watch.feed(resumed) is not None:
        return "stop"
    if not set(request.sampling.stop_token_ids).isdisjoint(resumed[request.sampling.min_tokens :]):
        return "stop"
    return "length" if len(resumed) >= request.sampling.max_tokens else None


def _stream(ids: list[int]) -> Any:
    from tokenizers.decoders import DecodeStream

    # special tokens are text here: "<|im_end|>" is a likely stop string
    return DecodeStream(ids=ids, skip_special_tokens=False)


def load_tokenizer(model: Path) -> Any:
    """The `tokenizers.Tokenizer` of a model folder. Raises `RequestRefused` where it has none that can be used."""
    try:
        from tokenizers import Tokenizer

        if (model / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(model / "tokenizer.json"))
        if not any((model / name).is_file() for name in _FILES):
            raise RequestRefused(
                f"stop strings need a tokenizer, and {model} holds none",
                next_step="save the tokenizer there, or use stop_token_ids",
            )
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        return loaded.backend_tokenizer
    except RequestRefused:
        raise
    except Exception as error:  # the libraries raise whatever they like for a folder they cannot read
        raise RequestRefused(
            f"stop strings need a tokenizer, and the one in {model} cannot be used: {type(error).__name__}: {error}",
            next_step="save it as tokenizer.json, or use stop_token_ids",
        ) from error
