"""`belayer serve`: the HTTP gateway on a terminal."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
from rich.console import Console

from belayer.config import load_config
from belayer.errors import ConfigError
from belayer.gateway import GatewaySettings, serve

console = Console(highlight=False, soft_wrap=True)
TOKEN_VARIABLE = "BELAYER_TOKEN"
_TOKEN_STEP = f"give a file that holds the token and nothing else, or set {TOKEN_VARIABLE}"


def serve_command(
    model: Path | None,
    *,
    upstream: list[str],
    config: Path | None,
    run_dir: Path,
    token_file: Path | None,
    tokenizer: Path | None,
    max_model_len: int | None,
    dtype: str | None,
    seed: int | None,
    settings: GatewaySettings,
) -> int:
    if model is not None and upstream:
        raise ConfigError("give a model folder or --upstream, not both")
    loaded = load_config(
        config,
        {
            "engine.model": None if model is None else model.expanduser().absolute(),
            "engine.max_model_len": max_model_len,
            "engine.dtype": dtype,
            "run.seed": seed,
        },
    )
    if upstream:
        loaded = loaded.model_copy(update={"engine": loaded.engine.model_copy(update={"model": None})})
    elif loaded.engine.model is None:
        raise ConfigError("nothing to serve", next_step="give a model folder, or --upstream http://HOST:PORT")
    settings = _with_token(settings, token_file)
    return asyncio.run(serve(loaded, settings, run_dir, upstreams=upstream, tokenizer=tokenizer, say=console.print))


def _with_token(settings: GatewaySettings, token_file: Path | None) -> GatewaySettings:
    """Not a flag: what is on a command line can be read by everyone on the host."""
    if token_file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
    else:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"--token-file {token_file} cannot be read: {why}", next_step=_TOKEN_STEP) from None
        if not token:
            raise ConfigError(f"--token-file {token_file} is empty", next_step=_TOKEN_STEP)
    return msgspec.structs.replace(settings, token=token)
