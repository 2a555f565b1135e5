"""What the gateway's tests share: a model with a tokenizer, and a gateway that runs in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from belayer.gateway.gateway import Gateway
from belayer.gateway.serving import listening
from belayer.gateway.settings import GatewaySettings
from belayer.gateway.text import Text
from belayer.gateway.upstream import Upstream
from belayer.gateway.upstream.external import ExternalServers
from belayer.gateway.upstream.own import OwnEngine
from belayer.journal import Journal
from belayer.ownership import RunLabel
from tests.engine_kit import VOCABULARY, byte_tokenizer, engine_config, make_model

END = VOCABULARY - 1  # "<|end|>"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_chat_model(folder: Path, seed: int = 0) -> Path:
    """A model folder with random weights, a byte-level tokenizer, a chat template and an end-of-sequence token."""
    make_model(folder, seed=seed)
    byte_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


class Served:
    """A gateway over one engine, in a thread with an event loop of its own."""

    def __init__(self, folder: Path, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        self._engine = engine or {}
        self.model = make_chat_model(folder / "model")
        self.run = folder / "run"
        self.run.mkdir()
        self.url = ""
        self.gateway: Gateway
        self.upstream: OwnEngine
        self._settings = GatewaySettings(**({"port": 0, "names": ("tiny",), "heartbeat_s": 0.2} | settings))
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="gateway")

    def __enter__(self) -> Served:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            label = stack.enter_context(RunLabel.new("gateway tests"))
            config = engine_config(self.model, **self._engine)
            self.upstream = await OwnEngine.start(config, label, self.run)
            stack.push_async_callback(self.upstream.close)
            journal = Journal(self.run / "journal")
            stack.callback(journal.close)
            self.gateway = Gateway(self.upstream, Text(self.model), journal, self._settings)
            self.url = await stack.enter_async_context(listening(self.gateway))
            self._ready.set()
            await self._stop.wait()

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 120) -> Any:
        """Run it in the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def kill_worker(self) -> int:
        """SIGKILL, with a shadow standing by. Returns the dead worker's pid."""
        pid = self.upstream.engine.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_standby(self) -> None:
        self.call(self.upstream.engine.wait_standby(120))

    def wait_idle(self, timeout_s: float = 30) -> None:
        """Until no completion is under way."""
        wait_for(lambda: self.gateway.runner.running == 0, timeout_s)

    @asynccontextmanager
    async def in_front(self, urls: list[str], folder: Path, **settings: Any) -> AsyncIterator[tuple[str, Gateway]]:
        """Another gateway, in the caller's loop, that fronts `urls` as external servers."""
        folder.mkdir()
        journal = Journal(folder / "journal")
        front: Upstream = await ExternalServers.start(urls, self.model, 20.0)
        try:
            gateway = Gateway(front, Text(self.model), journal, GatewaySettings(port=0, heartbeat_s=0.2, **settings))
            async with listening(gateway) as url:
                yield url, gateway
        finally:
            await front.close()
            journal.close()


@contextmanager
def relay(target: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that passes TCP on to `target`: a server that can be killed without killing what it serves."""
    code = (
        "import asyncio, sys\n"
        "async def pump(r, w):\n"
        "    while data := await r.read(65536):\n"
        "        w.write(data); await w.drain()\n"
        "    w.close()\n"
        "async def main():\n"
        "    host, port = sys.argv[1].split('://')[1].split(':')\n"
        "    async def serve(r, w):\n"
        "        r2, w2 = await asyncio.open_connection(host, int(port))\n"
        "        await asyncio.gather(pump(r, w2), pump(r2, w), return_exceptions=True)\n"
        "    server = await asyncio.start_server(serve, '127.0.0.1', 0)\n"
        "    print(server.sockets[0].getsockname()[1], flush=True)\n"
        "    await server.serve_forever()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, target], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
    finally:
        process.kill()
        process.wait()


class Cli:
    """`belayer serve` as a process of its own."""

    def __init__(self, run: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.run = run
        command = [sys.executable, "-m", "belayer.cli", "serve", "--port", "0", "--run-dir", str(run), *arguments]
        self.log = run.parent / f"{run.name}.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})})

    def wait_url(self, timeout_s: float = 120) -> str:
        file = self.run / "gateway.json"

        def there() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(FileNotFoundError, ValueError):
                return json.loads(file.read_text())["pid"] == self.process.pid
            return False

        wait_for(there, timeout_s)
        return json.loads(file.read_text())["url"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Cli:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.kill()


def wait_for(condition: Any, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def sse(line: str) -> Any:
    """The object in a line of server-sent events; None for all other lines."""
    return json.loads(line[6:]) if line.startswith("data: {") else None


async def stream(url: str, path: str, body: dict[str, Any], **kwargs: Any) -> AsyncIterator[Any]:
    """The events of a streamed answer, as objects; "[DONE]" and ":" (a heartbeat) as themselves."""
    async with (
        httpx.AsyncClient(timeout=120, trust_env=False) as client,
        client.stream("POST", url + path, json=body | {"stream": True}, **kwargs) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith(":"):
                yield ":"
            elif line == "data: [DONE]":
                yield "[DONE]"
            elif line:
                yield sse(line)


def tokens_of(events: list[Any]) -> list[int]:
    """The token ids of a completion's events."""
    return [
        token
        for event in events
        if isinstance(event, dict)
        for c in event.get("choices", ())
        for token in c["token_ids"]
    ]
