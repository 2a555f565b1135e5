"""State in a sandbox that can be asked whether it is still what it was: for the benchmark and for the tests.

`Box` is what a sandbox of any runtime, Belayer's or not, offers to a workload.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from belayer.sandbox import ExecResult

READY_S = 60.0  # longest that one action of a workload may take

# holds bytes in memory and says their checksum, and how often it was asked; {data} is a Python expression
SERVER = """
import hashlib, http.server, os
data, asked = {data}, 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        body = f"{{hashlib.sha256(data).hexdigest()}} {{asked}}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
# bash alone: starting a Python interpreter for each question would take longer than a restore
ASK = "exec 9<>/dev/tcp/127.0.0.1/8000 && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&9 && cat <&9"
# the same bytes in every process that holds them, and its checksum into a file when asked by a signal
MEMORY = """
import hashlib, os, signal
data = hashlib.shake_128(b"belayer").digest({size})
def tell(*_):
    with open("/tmp/memory.new", "w") as file:
        file.write(hashlib.sha256(data).hexdigest())
    os.rename("/tmp/memory.new", "/tmp/memory")
signal.signal(signal.SIGUSR1, tell)
open("/tmp/memory-ready", "w").close()
while True:
    signal.pause()
"""


class Box(Protocol):
    """A running container."""

    async def exec(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """A command in a fresh process."""
        ...

    async def shell(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """A command in the persistent shell."""
        ...

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """A file."""
        ...


def must(result: ExecResult, what: str) -> str:
    """The output of a command that must succeed. Raises `RuntimeError`."""
    if not result.ok:
        raise RuntimeError(f"the workload itself failed at {what!r}: {result}")
    return result.stdout.decode()


async def ask(box: Box) -> tuple[str, int]:
    """(checksum, number of questions) from the server inside; ("", -1) when it does not answer with 200."""
    result = await box.exec(ASK, timeout_s=READY_S)
    head, _, body = result.stdout.decode(errors="replace").partition("\r\n\r\n")
    words = body.split()
    if not result.ok or " 200 " not in head.partition("\n")[0] or len(words) != 2:
        return "", -1
    return words[0], int(words[1])


async def memory(box: Box) -> str:
    """Checksum of the memory of the process `$memory`, by the process itself; "" when it does not say."""
    asked = await box.shell("rm -f /tmp/memory; kill -USR1 $memory", timeout_s=READY_S)
    deadline = time.monotonic() + READY_S
    while asked.ok and time.monotonic() < deadline:
        said = await box.exec("cat /tmp/memory", timeout_s=READY_S)
        if said.ok:
            return said.stdout.decode()
        await asyncio.sleep(0.01)
    return ""
