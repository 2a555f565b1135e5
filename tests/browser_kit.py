"""A headless Chromium for tests, spoken to over its debugging protocol (CDP) on a WebSocket."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `problems` collects exceptions, console errors and failed loads since `open`."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout_s: float = 30, **parameters: Any) -> dict[str, Any]:
        """One command and its result; raises `AssertionError` when the browser refuses it."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        deadline = time.monotonic() + timeout_s
        while True:
            message = json.loads(self._socket.recv(timeout=max(0.01, deadline - time.monotonic())))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._event(message)

    def open(
        self, url: str, *, width: int = 1100, height: int = 900, dark: bool = False, timeout_s: float = 30
    ) -> None:
        """Load `url` and wait until it has loaded."""
        self.problems.clear()
        self._loaded = False
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        deadline = time.monotonic() + timeout_s
        while not self._loaded:
            self._event(json.loads(self._socket.recv(timeout=max(0.01, deadline - time.monotonic()))))
        # two frames later what is drawn on canvases is there too
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited), as plain data."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The visible part of the page, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _event(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            said = " ".join(str(one.get("value", one.get("description"))) for one in about["args"])
            self.problems.append(f"console: {said}")
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(f"log: {about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.loadingFailed":
            self.problems.append(f"load: {about['errorText']}")


@contextmanager
def browser() -> Iterator[Page]:
    """A fresh Chromium with one tab, gone with its profile at the end. Needs `find_browser()` and websockets."""
    from websockets.sync.client import connect

    program = find_browser()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="belayer-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)
            import httpx

            tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=10, trust_env=False).json()
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            with connect(address, max_size=None, open_timeout=10, proxy=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(file: Path, process: subprocess.Popen[bytes], deadline_s: float = 30) -> int:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError("the browser opened no debugging port in time")
