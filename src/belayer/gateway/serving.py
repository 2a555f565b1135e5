"""`belayer serve`: opens a run directory, starts an upstream, listens, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from belayer import events
from belayer.config import Config
from belayer.errors import BelayerError, ConfigError, SandboxUnavailable
from belayer.files import write_atomically
from belayer.gateway.gateway import Gateway
from belayer.gateway.http import make_app
from belayer.gateway.settings import GatewaySettings
from belayer.gateway.text import Text
from belayer.gateway.upstream import Upstream
from belayer.gateway.upstream.external import ExternalServers
from belayer.gateway.upstream.own import WEIGHTS_FILE, OwnEngine, check_model
from belayer.journal import Journal, read_histories
from belayer.observe import MetricsLog
from belayer.observe.prometheus import RunMetrics
from belayer.ownership import RunLabel
from belayer.ownership.reap import reap
from belayer.run_directory import RunDirectory
from belayer.versions import versions

ADDRESS_FILE = "gateway.json"
_LINGER_S = 5.0  # for the last bytes of answers, once everything is generated


async def serve(
    config: Config,
    settings: GatewaySettings,
    directory: Path,
    *,
    upstreams: Sequence[str] = (),
    tokenizer: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Serve until SIGINT or SIGTERM; returns 0 then, and 1 when the engine could not go on.

    With `upstreams` external servers are fronted, else `config.engine` is started. `directory` is made, or gone on
    with: its sessions are there again. Raises `ConfigError` and other `BelayerError`s before it listens.
    """
    settings.check()
    if not upstreams:
        check_model(config.engine)
    if tokenizer is not None and not upstreams:
        raise ConfigError(
            "a tokenizer of its own is for --upstream: the engine looks for stop strings with its model folder's",
            next_step="put tokenizer.json into the model folder",
        )
    if tokenizer is not None and not tokenizer.is_dir():
        raise ConfigError(f"there is no folder {tokenizer}", next_step="check --tokenizer")
    stop = asyncio.Event()
    now = asyncio.Event()
    async with AsyncExitStack() as stack:
        _on_signals(stack, stop, now)
        listener = stack.enter_context(_bound(settings))
        starting = asyncio.ensure_future(_start(stack, config, settings, directory, upstreams, tokenizer, say))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return 0
        opened, gateway, sink = starting.result()
        upstream = gateway.upstream
        _begin(opened, gateway, sink)
        async with listening(gateway, listener) as url:
            address = {"url": url, "pid": os.getpid(), "model": gateway.served.names[0]}
            write_atomically(opened.path / ADDRESS_FILE, json.dumps(address).encode())
            stack.callback((opened.path / ADDRESS_FILE).unlink, missing_ok=True)
            count = len(gateway.sessions)
            say(f"{gateway.served.names[0]} is served at {url}/v1 ({count} sessions in {opened.path})")
            failure = await _until(stopping, upstream)
            say("shutting down" if failure is None else f"the engine cannot go on: {failure}")
            hurry = asyncio.ensure_future(now.wait())
            closing = asyncio.ensure_future(gateway.close(None if failure is None else 0.0))
            await asyncio.wait([hurry, closing], return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if not closing.done():
                closing.cancel()
                await gateway.close(0.0)
        return 0 if failure is None else 1


@asynccontextmanager
async def opened_gateway(
    config: Config, settings: GatewaySettings, directory: Path
) -> AsyncIterator[tuple[str, Gateway]]:
    """What `serve` serves, while the block runs and in the caller's event loop: its URL, and the gateway.

    Raises what `serve` raises before it listens.
    """
    settings.check()
    check_model(config.engine)
    async with AsyncExitStack() as stack:
        opened, gateway, sink = await _start(stack, config, settings, directory, (), None, lambda text: None)
        _begin(opened, gateway, sink)
        yield await stack.enter_async_context(listening(gateway)), gateway


@asynccontextmanager
async def listening(gateway: Gateway, listener: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve `gateway` while the block runs; gives its URL. Without `listener` its settings say where."""
    with contextlib.ExitStack() as stack:
        if listener is None:
            listener = stack.enter_context(_bound(gateway.settings))
        config = uvicorn.Config(
            make_app(gateway),
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(_LINGER_S),
            server_header=False,
        )
        server = _Server(config)
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if serving.done():
                    serving.result()
                    raise ConfigError("the HTTP server ended at once")
                await asyncio.sleep(0.005)
            host, port = listener.getsockname()[:2]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            if not gateway.draining:
                await gateway.close(0.0)
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        """Signals are `serve`'s: first what is under way ends, then the server."""
        yield


@contextlib.contextmanager
def _bound(settings: GatewaySettings):
    """The listening address, taken before anything slow is started."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(
                f"{settings.host}:{settings.port} cannot be listened on: {error.strerror or error}",
                next_step="stop what listens there, or choose another --port",
            ) from None
        yield listener
    finally:
        listener.close()


async def _start(
    stack: AsyncExitStack,
    config: Config,
    settings: GatewaySettings,
    directory: Path,
    upstreams: Sequence[str],
    tokenizer: Path | None,
    say: Callable[[str], None],
) -> tuple[RunDirectory, Gateway, events.EventSink]:
    """All that must be there before clients are answered. What may fail for a wrong argument comes before run.json."""
    watching: list[events.EventSink] = []

    def sink(event: events.Event) -> None:
        for watcher in watching:
            watcher(event)

    upstream: Upstream
    if upstreams:
        say(f"asking {', '.join(upstreams)} what they serve (for up to {settings.recover_s:g} s)")
        upstream = await ExternalServers.start(upstreams, tokenizer, settings.recover_s, sink=sink)
        stack.push_async_callback(upstream.close)
    serves = "external servers" if upstreams else str(config.engine.model)
    opened = _open(config, directory, serves)
    stack.callback(opened.close)
    say(f"run directory: {opened.path}")
    journal = Journal(opened.path / "journal", durability=config.run.durability)
    stack.callback(journal.close)
    metrics = RunMetrics(run=opened.path.name, journal=opened.path / "journal")
    log = stack.enter_context(MetricsLog(opened.path / "metrics.jsonl"))
    watching += [metrics, log]
    if not upstreams:
        say(f"starting the engine with {config.engine.model}: it loads the weights and a worker, which takes a while")
        try:
            await asyncio.to_thread(reap)
            label = stack.enter_context(RunLabel.new(str(opened.path)))
        except PermissionError as error:
            raise SandboxUnavailable(f"the engine needs root: {error}", next_step="run as root, or with sudo") from None
        upstream = await OwnEngine.start(config.engine, label, opened.path, sink=sink)
        stack.push_async_callback(upstream.close)
    folder = tokenizer or (config.engine.model if not upstreams else None)
    if folder is not None:
        say(f"reading the tokenizer of {folder}")
    text = await asyncio.to_thread(Text, folder)
    seed = int(opened.about.get("seed", 0))
    gateway = Gateway(upstream, text, journal, settings, seed=seed, registry=metrics.registry, sink=sink)
    return opened, gateway, sink


def _begin(opened: RunDirectory, gateway: Gateway, sink: events.EventSink) -> None:
    about = {"seed": opened.about.get("seed", 0), "resumed": opened.resumed, "versions": versions()}
    sink(events.Event(kind=events.RUN_STARTED, data=about))
    gateway.sessions.announce()


def _open(config: Config, directory: Path, serves: str) -> RunDirectory:
    """The run directory, which is `serves`' from now on. One in which nothing has happened yet may change hands."""
    about = {"seed": config.run.seed, "config": config.model_dump(mode="json"), "gateway": serves}
    opened = RunDirectory.open(directory, about=about)
    try:
        before = opened.about.get("gateway")
        if before == serves:
            return opened
        if before is not None and not (opened.path / WEIGHTS_FILE).exists() and not _journalled(opened.path):
            opened.about.update(about)
            write_atomically(opened.path / "run.json", json.dumps(opened.about, indent=1, default=str).encode())
            return opened
        what = "is not a gateway's" if before is None else f"holds sessions of a gateway in front of {before}"
        raise ConfigError(
            f"the run directory {opened.path} {what}, not {serves}",
            kept="the run, untouched",
            next_step="give another --run-dir",
        )
    except BaseException:
        opened.close()
        raise


def _journalled(run: Path) -> bool:
    return (run / "journal").is_dir() and bool(read_histories(run / "journal"))


async def _until(stopping: asyncio.Future[Any], upstream: Upstream) -> BelayerError | None:
    """Wait for a signal, or for an engine that will not serve any more; returns why, in that case."""
    while not stopping.done():
        await asyncio.wait([stopping], timeout=1.0)
        if isinstance(upstream, OwnEngine) and not stopping.done():
            try:
                upstream.check()
            except BelayerError as error:
                return error
    return None


def _on_signals(stack: AsyncExitStack, stop: asyncio.Event, now: asyncio.Event) -> None:
    """The first signal asks to end, the second one not to wait."""
    loop = asyncio.get_running_loop()

    def asked() -> None:
        (now if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
        stack.callback(loop.remove_signal_handler, number)
