"""A large area of memory is after a restore what it was: content, holes, bounds, flags, and that it can be resized."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, kill_init, run, sandboxes, shell

pytestmark = [pytest.mark.integration, needs_sandboxes]

# 20 MB and a bit, at no round address, with holes of single pages and of megabytes, one part read-only
PROGRAM = r"""
import ctypes, hashlib, json, mmap, os, time
size = (20 << 20) + 12288
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    if not 9 << 20 <= at < 12 << 20 and (at >> 20 != 5 or at % 8192):
        area[at : at + 8] = (at * 2654435761 % 2**64).to_bytes(8, "little")
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
libc = ctypes.CDLL(None)
libc.mprotect(ctypes.c_void_p(start + (16 << 20)), 1 << 20, 1)
libc.mremap.restype = ctypes.c_void_p

def looks():
    found, inside = [], False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0]:
            low, high = (int(part, 16) for part in words[0].split("-"))
            inside = low < start + size and start < high
            if inside:
                found.append([low, high, words[1]])
        elif inside and words[0] in ("Rss:", "VmFlags:"):
            found[-1].append([word for word in words[1:] if word not in ("sd", "ac")])
    return found

number = 0
while True:
    while not os.path.exists(f"/tmp/ask{number}"):
        time.sleep(0.01)
    answer = {"looks": looks()}
    if os.path.exists("/tmp/read"):  # this fills holes
        grown = libc.mremap(ctypes.c_void_p(start), 16 << 20, 15 << 20, 0)
        answer["resized"] = grown == start
        parts = [ctypes.string_at(start, 15 << 20), ctypes.string_at(start + (16 << 20), 4 << 20)]
        answer["content"] = hashlib.sha256(b"".join(parts)).hexdigest()
    open("/tmp/new", "w").write(json.dumps(answer))
    os.rename("/tmp/new", f"/tmp/answer{number}")
    number += 1
"""


def test_large_areas_are_what_they_were(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            await box.write("/root/program.py", PROGRAM.encode())
            await shell(box, "python3 /root/program.py >/tmp/log 2>&1 &")

            async def ask(box, number: int) -> dict:
                await run(box, f"touch /tmp/ask{number}")
                await eventually("it answers", lambda: box.exists(f"/tmp/answer{number}"))
                return json.loads(await run(box, f"cat /tmp/answer{number}"))

            before = await ask(box, 0)
            for number in (1, 2):
                manifest = await box.checkpoint(action=number)
                kill_init(box)
                box = await manager.restore("s", manifest.id)
                assert await ask(box, number) == before
            await run(box, "touch /tmp/read")
            restored = await ask(box, 3)
            assert restored["resized"], "one area has become several"
            assert restored["content"] == hashlib.sha256(content(0, 15) + content(16, 20)).hexdigest()

    asyncio.run(body())


def content(first: int, last: int) -> bytes:
    """What the program has written between these megabytes."""
    area = bytearray((last - first) << 20)
    for at in range(first << 20, last << 20, 4096):
        if not 9 << 20 <= at < 12 << 20 and (at >> 20 != 5 or at % 8192):
            begin = at - (first << 20)
            area[begin : begin + 8] = (at * 2654435761 % 2**64).to_bytes(8, "little")
    return bytes(area)
