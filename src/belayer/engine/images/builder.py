"""Makes one image, in a process of its own beside an engine that serves.

    python -m belayer.engine.images.builder REQUEST_FD PARENT_PID

Template, dump, thin, canary, publish. The canary is the product's own path: an owner, a worker restored from the new
image with `fill`, the same requests as before the dump; the image exists for others only if it repeats every token.
The answer on standard output is one JSON line. The process dies with its parent, and everything it has made with it;
what it leaves in the store is removed by the next builder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from belayer.engine._wire import Activate, Activated, FromWorker, Ready, Refusal, Spec, Submit, Tokens, receive_with_fds
from belayer.engine._wire import send_with_fds as send
from belayer.engine.images import _criu, _pdeath, canary, thin
from belayer.engine.images.key import Key, template_environment
from belayer.engine.images.restore import NOBODY, Restorer, set_label
from belayer.engine.images.store import Image, ImageRefused, ImageStore, Meta, check_files
from belayer.engine.images.template import INIT, PLACEHOLDERS, WORKER, Built, Order
from belayer.engine.memory.host import die_with_parent
from belayer.engine.owner.process import OwnerProcess
from belayer.engine.workers.link import WorkerLink
from belayer.errors import BelayerError, EngineError, StorageFull
from belayer.ownership import RunLabel

CANARY_TIMEOUT_S = 60.0
DUMP_TIMEOUT_S = 120.0
_FENCE_S = 10.0


class Request(msgspec.Struct):
    """Build the image for `key`. `spec` describes the worker; `env` is what an engine's workers get."""

    key: dict[str, str]
    spec: Spec
    vocab_size: int
    env: dict[str, str]
    store: str
    budget_bytes: int
    label: str
    work: str
    start_timeout_s: float
    nice: int


class Outcome(msgspec.Struct):
    """What became of it: `built`, `exists` (another builder was quicker), `busy` (one is at it), or `failed`."""

    state: str
    reason: str = ""
    nbytes: int = 0
    phases: dict[str, float] = {}


class _Build:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._work = Path(request.work)
        self._label = RunLabel(request.label, -1)  # the run's own: whatever is made here belongs to it
        self._label.dir = self._work
        self._phases: dict[str, float] = {}

    async def run(self) -> Outcome:
        request = self._request
        key = Key(request.key)
        store = ImageStore(request.budget_bytes, Path(request.store))
        with store.building(key) as folder:
            if folder is None:
                return Outcome("busy")
            with contextlib.suppress(ImageRefused):
                if store.find(key) is not None:
                    return Outcome("exists")
            folder.mkdir(exist_ok=True)
            began = time.monotonic()
            try:
                built = await self._template(folder)
                self._thin(folder)
                meta = Meta(
                    key=request.key,
                    sources=built.sources,
                    layout=built.layout,
                    canary=built.canary,
                    inherited=built.inherited,
                    files=self._timed("checksum_s", lambda: check_files(folder)),
                    made_at=time.time(),
                    build_s=time.monotonic() - began,
                )
                await self._try(Image(folder, meta, published=False))
                store.publish(folder, meta)
            except (BelayerError, OSError, ValueError, EOFError, TimeoutError) as error:
                why = error.what if isinstance(error, BelayerError) else f"{type(error).__name__}: {error}"
                if not isinstance(error, OSError | StorageFull):  # a full disk, a busy machine: it may pass
                    store.note_failure(key, why)
                return Outcome("failed", why, phases=self._phases)
            return Outcome("built", nbytes=Image(folder, meta).nbytes, phases=self._phases)

    # -- the processes that are dumped ---------------------------------------------------------------------------------
    async def _template(self, folder: Path) -> Built:
        """Build a worker, and dump it into `folder`."""
        request = self._request
        began = time.monotonic()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        trigger, pull = os.pipe()
        fds = [theirs.fileno(), trigger]
        log = self._work / "template.log"
        env = template_environment(request.env) | self._label.env
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_init.py")), str(os.getpid())]
        command += [sys.executable, "-m", "belayer.engine.images.template", *map(str, fds), str(folder)]
        with open(log, "ab") as output, control, theirs:
            outside = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, pass_fds=fds, cwd="/"
            )
            theirs.close()
            os.close(trigger)
            try:
                control.settimeout(request.start_timeout_s)
                send(control, Order(request.spec, request.vocab_size), [])
                try:
                    built = await asyncio.to_thread(lambda: receive_with_fds(control, Built)[0])
                    if await asyncio.to_thread(control.recv, 1):
                        raise EngineError("the worker to be dumped says more than was asked")
                except (EOFError, OSError) as error:
                    raise EngineError(f"the worker to be dumped was not built: {error}\n{_tail(log)}") from None
                self._phases["template_s"] = time.monotonic() - began
                began = time.monotonic()
                (init,) = _children(outside.pid)
                for pid in (init, *_children(init)):
                    _not_nice(pid)
                    set_label(pid, NOBODY)
                await _criu.dump(init, folder, timeout_s=DUMP_TIMEOUT_S)
                if any(folder.glob("ghost-file-*")):
                    # CRIU makes such a file anew under its old name, and two restores at once collide there
                    raise EngineError("the worker to be dumped maps a file that has no name any more")
            finally:
                os.close(pull)
                outside.kill()  # what is left of the namespace dies with it
                await asyncio.to_thread(outside.wait)
        _pdeath.clear(folder, INIT)
        for name in (*PLACEHOLDERS, "dump.log", "stats-dump"):
            (folder / name).unlink(missing_ok=True)
        self._phases["dump_s"] = time.monotonic() - began
        return built

    def _thin(self, folder: Path) -> None:
        self._timed("thin_s", lambda: thin.make_thin(folder, folder, WORKER))

    def _timed(self, phase: str, work):
        began = time.monotonic()
        result = work()
        self._phases[phase] = time.monotonic() - began
        return result

    # -- the canary ----------------------------------------------------------------------------------------------------
    async def _try(self, image: Image) -> None:
        """Restore it and have it repeat what was said before the dump."""
        began = time.monotonic()
        request = self._request
        owner = OwnerProcess(self._label, 1, request.env, self._work, request.spec.device)
        try:
            await owner.wait_ready(request.start_timeout_s)
            spec = msgspec.structs.replace(request.spec, generation=1, owner_socket=str(owner.path), fill=True)
            restorer = Restorer(image, self._label, self._work)
            link = await WorkerLink.start(restorer, lambda: spec, self._work / "canary.log")
            try:
                async with asyncio.timeout(CANARY_TIMEOUT_S):
                    words = await self._converse(link, str(owner.path))
            finally:
                await link.fence(_FENCE_S)
        finally:
            await owner.close()
        exact = request.spec.batch_invariant
        if (wrong := canary.difference(image.meta.canary, words, exact=exact)) is not None:
            raise EngineError(f"the restored worker is not the one that was dumped: {wrong}")
        self._phases["canary_s"] = time.monotonic() - began

    async def _converse(self, link: WorkerLink, owner_socket: str) -> list[canary.Words]:
        heard: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        link.on_message = heard.put_nowait
        link.child.on_exit(lambda _how: heard.put_nowait(None))
        work = canary.requests(self._request.vocab_size, self._request.spec.max_model_len)
        listener = canary.Listener(work)
        while not listener.done:
            match await heard.get():
                case Ready(_, layout_hash, epoch, _):
                    link.send(Activate(layout_hash, epoch, owner_socket))
                case Activated():
                    link.send(Submit(work))
                case Tokens(_, _, chunks):
                    listener.add(chunks)
                case Refusal(_, what, reason):
                    raise EngineError(f"the restored worker refused {what}: {reason}")
                case None:
                    raise EngineError(f"the restored worker ended: {link.child.exit_text()}\n{link.child.log_tail()}")
        return listener.words


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _not_nice(pid: int) -> None:
    """A restored process has the niceness it was dumped with."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def _tail(log: Path, lines: int = 12) -> str:
    return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def main(argv: list[str]) -> None:
    die_with_parent(int(argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle; it ends us
    with open(int(argv[0]), "rb") as stream:
        request = msgspec.json.decode(stream.read(), type=Request)
    os.setpriority(os.PRIO_PROCESS, 0, request.nice)
    Path(request.work).mkdir(parents=True, exist_ok=True)
    outcome = asyncio.run(_Build(request).run())
    print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
