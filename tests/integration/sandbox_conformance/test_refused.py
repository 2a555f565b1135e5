"""What cannot be captured is refused with its reason, and the sandbox goes on; or it cannot be made at all."""

from __future__ import annotations

import asyncio

import pytest
from tests.conftest import needs_sandboxes
from tests.integration.sandbox_conformance.conftest import IMAGE
from tests.sandbox_kit import eventually, sandboxes

from belayer.errors import CheckpointRefused

pytestmark = [pytest.mark.integration, needs_sandboxes]

HEAD = """
import ctypes, errno, os, socket, struct, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*args)
    return result if result >= 0 else -ctypes.get_errno()
"""
TAIL = """
open("/tmp/ready", "w").close()
time.sleep(3600)
"""
# what a program does: a piece of the reason
REFUSED = {
    "TCP connection nobody has accepted": (
        "l = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen(4); c = socket.create_connection(l.getsockname())",
        "(?i)in-flight",
    ),
    "half-closed TCP connection": (
        "l = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen(4); c = socket.create_connection(l.getsockname());"
        " s = l.accept()[0]; s.sendall(b'last words'); s.shutdown(1); time.sleep(0.1)",
        "half closed",
    ),
    "Unix connection nobody has accepted, with data": (
        "l = socket.socket(1); l.bind('/tmp/door'); l.listen(4);"
        " c = socket.socket(1); c.connect('/tmp/door'); c.send(b'x')",
        "in-flight",
    ),
    "UDP datagram nobody has read": (
        "s = socket.socket(2, 2); s.bind(('127.0.0.1', 0)); s.sendto(b'x', s.getsockname())",
        "UDP",
    ),
    "inotify event nobody has read": (
        "f = call('inotify_init1', 0); call('inotify_add_watch', f, b'/tmp', 0x100); open('/tmp/new', 'w').close()",
        "inotify events",
    ),
    "inotify watch of a deleted file": (
        "o = open('/tmp/gone', 'w'); f = call('inotify_init1', 0); call('inotify_add_watch', f, b'/tmp/gone', 2);"
        " os.unlink('/tmp/gone')",
        "watches a deleted file",
    ),
    "lock on a mapped file, as of sqlite in WAL mode": (
        "import sqlite3; c = sqlite3.connect('/tmp/base'); c.execute('pragma journal_mode=wal');"
        " c.execute('create table t(n)')",
        "lock on a file that it has mapped",
    ),
    "eventfd in semaphore mode": ("f = os.eventfd(3, os.EFD_SEMAPHORE)", "semaphore mode"),
}
# what a program asks for: the errno that it gets, so that it does without
DENIED = {
    "io_uring": ("libc.syscall(425, 8, 0)", "ENOSYS"),
    "user namespace": ("libc.unshare(0x10000000)", "EPERM"),
    "pid namespace": ("libc.unshare(0x20000000)", "EPERM"),
    "mount namespace": ("libc.unshare(0x20000)", "EPERM"),
    "clone3, whose flags cannot be looked at": ("libc.syscall(435, 0, 0)", "ENOSYS"),
    "ptrace": ("libc.ptrace(16, 1, 0, 0)", "EPERM"),
    "userfaultfd": ("libc.syscall(323 if x else 282, 0)", "ENOSYS"),
    "secret memory": ("libc.syscall(447, 0)", "ENOSYS"),
    "POSIX message queue": ("libc.mq_open(b'/queue', 66, 0o600, None)", "ENOSYS"),
    "perf events": ("libc.syscall(298 if x else 241, 0, 0, 0, 0, 0)", "EPERM"),
    "BPF": ("libc.syscall(321 if x else 280, 0, 0, 0)", "EPERM"),
    "kernel keyring": ("libc.syscall(250 if x else 219, 0, 0)", "EPERM"),
    "fanotify": ("libc.fanotify_init(0, 0)", "EPERM"),
}


def test_what_cannot_be_captured_is_refused(tmp_path):
    async def body() -> dict[str, str]:
        wrong: dict[str, str] = {}
        async with sandboxes(tmp_path / "checkpoints", image=IMAGE) as manager:
            box = await manager.create("refused")
            assert (await box.shell("kept=yes")).ok
            for name, (code, reason) in REFUSED.items():
                await box.write("/tmp/program.py", (HEAD + code + TAIL).encode())
                started = await box.exec(
                    "rm -f /tmp/ready; : >/tmp/said; python3 /tmp/program.py >/tmp/said 2>&1 & echo $!"
                )

                async def ready() -> bool:
                    return await box.exists("/tmp/ready")

                await eventually(f"{name}: {(await box.read('/tmp/said')).decode()}", ready, 20)
                try:
                    with pytest.raises(CheckpointRefused, match=reason) as caught:
                        await box.checkpoint(action=1)
                    assert caught.value.kept, "it does not say what is kept"
                except BaseException as error:
                    wrong[name] = repr(error)
                assert (await box.shell("echo $kept")).stdout == b"yes\n", f"{name}: the sandbox did not go on"
                await box.exec(f"kill -9 {started.stdout.decode().strip()}; rm -rf /tmp/*")
            # with none of it any more the checkpoint passes
            box = await box.restore((await box.checkpoint(action=2)).id)
            assert (await box.shell("echo $kept")).stdout == b"yes\n"
        return wrong

    assert asyncio.run(body()) == {}


def test_what_cannot_be_captured_is_denied(tmp_path):
    lines = [
        HEAD,
        "import platform; x = platform.machine() == 'x86_64'; wrong = []",
        *(
            f"ctypes.set_errno(0); r = {code}; n = ctypes.get_errno()\n"
            f"if r != -1 or n != errno.{wanted}: wrong.append(({name!r}, r, errno.errorcode.get(n, n)))"
            for name, (code, wanted) in DENIED.items()
        ),
        "print(wrong)",
    ]

    async def body() -> str:
        async with sandboxes(tmp_path / "checkpoints", image=IMAGE) as manager:
            box = await manager.create("denied")
            result = await box.exec(["python3", "-c", "\n".join(lines)])
            return result.text

    assert asyncio.run(body()) == "[]\n"
