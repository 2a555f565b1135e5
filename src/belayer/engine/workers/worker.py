"""A rollout engine worker: the serving one and the shadow are the same program.

It is forked from the nursery, which has the imports done already (`belayer.engine.workers.nursery`), or restored from
an image, which has everything done but the weights (`belayer.engine.images`).

Start: model on the owner's weights, warm-up on scratch KV memory, `Ready`. Then it waits; that is a shadow.
`Activate` makes it the serving worker: it checks that the epoch it looks at is the one asked for, maps the KV arena
under the addresses it already uses and forgets what it cached. From then on it alternates between messages and steps.

Any exception ends the process. The supervisor sees the exit, the log holds the traceback, and nothing half-broken
goes on serving.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from belayer.engine._wire import (
    Abort,
    Activate,
    Activated,
    Adopted,
    Damaged,
    Epoch,
    FromWorker,
    Ready,
    Refusal,
    Spec,
    Submit,
    Switch,
    Switched,
    Tokens,
    ToWorker,
    Unpacker,
    pack,
    receive_with_fds,
)
from belayer.engine.backends import Sealing
from belayer.engine.memory import Region, Scratch, of
from belayer.engine.memory.host import set_nice
from belayer.engine.owner.client import OwnerClient
from belayer.engine.weights.checkpoint_files import checkpoint_tensors
from belayer.engine.weights.first_epoch import copy_tensors
from belayer.engine.weights.layout import Layout, digest
from belayer.engine.workers import cohort, lifeline
from belayer.engine.workers.outbox import Outbox
from belayer.engine.workers.progress import Phase, Progress
from belayer.errors import WeightsError

if TYPE_CHECKING:
    from belayer.engine.backends import Backend

VERIFIED_AT_ONCE = 64 << 20  # weights up to this many bytes are read again at a promotion: some 5 ms
SCRUB_PAUSE = 200  # times a scrub's processor time until the next, at least: large weights cost 0.5 % of a core


class Worker:
    """Holds the engine and the epoch; `run` never returns normally."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._slots: list[int] = []
        self._standing_by = True  # until it maps an arena
        self._scrub_pause_s = spec.scrub_s
        self._epoch: Epoch | None = None
        self._seals: Region | None = None
        self._phases: dict[str, float] = {}
        self.engine: Backend
        self.layout: Layout
        self.region: Region

    def connect(self, channel: socket.socket, progress: Progress) -> None:
        """Meet the driver and the owner."""
        self._channel = channel
        self._outbox = Outbox()
        self._progress = progress
        self._owner = OwnerClient.connect(Path(self.spec.owner_socket))
        self._owner_path = self.spec.owner_socket

    def start(self) -> None:
        """Everything slow but the imports."""
        self.build(self._attach)
        began = time.monotonic()
        self.engine.warm_up()
        self._phases["warm_up_s"] = time.monotonic() - began
        self._announce()

    def build(self, attach: Callable[[Region, int, Layout | None], Layout]) -> None:
        """Make the engine; `attach` puts weights under it (`OwnedWeights.attach`)."""
        from belayer.engine import backends
        from belayer.engine.backends.owned_weights import OwnedWeights

        _die_of_crashes()
        weights = OwnedWeights(fill=self.spec.fill, batch_invariant=self.spec.batch_invariant, device=self.spec.device)
        weights.attach = attach
        began = time.monotonic()
        self.engine = backends.make(self.spec, weights)
        self._phases["engine_s"] = time.monotonic() - began - self._phases.get("wait_s", 0.0)
        assert weights.layout is not None and weights.region is not None
        self.layout, self.region = weights.layout, weights.region

    def revive(self, spec: Spec, channel: socket.socket, progress: Progress, check: Callable[[], None]) -> None:
        """Go on as the worker of `spec`: this process comes from an image, built and warmed up, without weights.

        `check` looks at the engine once real weights are there; it raises if it must not serve.
        """
        self.spec = spec
        self._phases = {}
        self.connect(channel, progress)
        began = time.monotonic()
        if spec.fill:
            self._first_epoch(self.region, self.layout, self._copy_checkpoint)
        else:
            found = self._attach(self.region, self.layout.nbytes, None)
            if found != self.layout:
                raise WeightsError(f"the image was made for layout {self.layout.hash()}, the owner's is {found.hash()}")
        self._phases["weights_s"] = time.monotonic() - began - self._phases.get("wait_s", 0.0)
        began = time.monotonic()
        if spec.warm or self.layout.nbytes <= VERIFIED_AT_ONCE:
            check()  # a forward pass of a large model is time that somebody may be waiting
        self._phases["warm_up_s"] = time.monotonic() - began
        self._announce()

    def _announce(self) -> None:
        assert self._epoch is not None
        self._progress.mark(Phase.IDLE)
        self._send(Ready(self.spec.generation, self.layout.hash(), self._epoch, self._phases))

    def _attach(self, region: Region, nbytes: int, loaded: Layout | None) -> Layout:
        """Put the owner's clean epoch under `region`; with `loaded`, make that epoch first, from what is there."""
        self.region = region
        if loaded is not None:
            self._first_epoch(region, loaded, lambda target: target.copy_from(region))
            return loaded
        began = time.monotonic()
        state, self._slots = self._owner.weights(when_clean=True, timeout_s=600.0)
        self._phases["wait_s"] = time.monotonic() - began
        if state.layout is None or state.clean is None:
            raise WeightsError("the owner holds no clean epoch")
        if state.layout.nbytes != nbytes:
            raise WeightsError(f"the owner's epoch has {state.layout.nbytes} bytes, this model needs {nbytes}")
        region.place(self._slots[state.clean.slot], writable=False, populate=True)
        self._verify(state.layout, state.clean)
        self._epoch = state.clean
        return state.layout

    def _first_epoch(self, region: Region, layout: Layout, write: Callable[[Region], None]) -> None:
        """Make the owner's first epoch with what `write` puts into it, and look at it."""
        self._owner.define(layout)
        _state, self._slots = self._owner.weights(when_clean=False)
        dirty = self._owner.begin()
        target = of(self.spec.device).reserve(region.nbytes, Scratch.NONE)
        target.place(self._slots[dirty.slot], writable=True)
        write(target)
        self._epoch = self._owner.commit(dirty.number, digest(layout, target), self.spec.policy_version)
        target.close()
        region.place(self._slots[dirty.slot], writable=False, populate=True)

    def _copy_checkpoint(self, target: Region) -> None:
        copy_tensors(self.layout, target, checkpoint_tensors(Path(self.spec.model)))

    def _verify(self, layout: Layout, epoch: Epoch) -> None:
        if (damage := self._damage(layout, epoch)) is not None:
            self._send(Damaged(self.spec.generation, epoch.number, damage))
            raise WeightsError(damage)

    def _damage(self, layout: Layout, epoch: Epoch) -> str | None:
        """Why what lies under the region is not `epoch`; None: it is, or nobody uses that epoch any more."""
        found = digest(layout, self.region)
        if found == epoch.digest:
            return None
        # the driver may have committed two updates while this ran; a damaged epoch, though, stays as it is
        newest = self._owner.state().clean
        if newest is not None and newest.number != epoch.number:
            return None
        return f"epoch {epoch.number} has digest {found}, its table entry says {epoch.digest}"

    def _scrub(self) -> None:
        """Look for damaged weights while there is nothing else to do."""
        assert self._epoch is not None
        began = time.thread_time()
        if (damage := self._damage(self.layout, self._epoch)) is not None:
            self._send(Damaged(self.spec.generation, self._epoch.number, damage))
        self._scrub_pause_s = max(self.spec.scrub_s, SCRUB_PAUSE * (time.thread_time() - began))

    def run(self) -> None:
        messages: Unpacker[ToWorker] = Unpacker(ToWorker)
        while True:
            wait = 0 if self.engine.busy else self._scrub_pause_s if self._standing_by else None
            readable = select.select([self._channel], [], [], wait)[0]
            if not readable and self._standing_by:
                self._scrub()
            if readable:
                data = self._channel.recv(1 << 20)
                if not data:
                    return  # the driver closed the channel: a normal end
                for message in messages.feed(data):
                    self._handle(message)
            if self.engine.busy:
                self._step()

    def _step(self) -> None:
        prefilling = self.engine.prefilling
        if prefilling:
            self._send_tokens()  # it may take long
        self._progress.mark(Phase.PREFILL if prefilling else Phase.DECODE)
        began = time.monotonic()
        chunks = self.engine.step()
        now = time.monotonic()
        self._progress.mark(Phase.IDLE)
        self._outbox.add(chunks)
        if self._outbox.due(now, now - began) or not self.engine.busy:
            self._send_tokens()
        if self.engine.sealing is not None:
            self.engine.sealing.seal()

    def _handle(self, message: ToWorker) -> None:
        self._send_tokens()  # they were made under what may change now
        match message:
            case Submit(work):
                for item in work:
                    self.engine.submit(item)
                    self._outbox.expect(item.id, watched=bool(item.sampling.stop))
                if self.engine.sealing is not None and (counts := self.engine.sealing.adopted()) is not None:
                    self._send(Adopted(self.spec.generation, *counts))
            case Abort(ids):
                self.engine.abort(ids)
                self._outbox.forget(ids)
            case Activate(layout_hash, epoch, owner_socket):
                self._activate(layout_hash, epoch, owner_socket)
            case Switch(epoch, owner_socket):
                self._use(epoch, owner_socket)
                self._send(Switched(self.spec.generation, epoch))

    def _activate(self, layout_hash: str, epoch: Epoch, owner_socket: str) -> None:
        phases: dict[str, float] = {}
        began = time.monotonic()
        if self.spec.nice:
            set_nice(0)
        if layout_hash != self.layout.hash():
            self._refuse("Activate", f"layout {self.layout.hash()} instead of {layout_hash}")
            return
        if not epoch.clean:
            self._refuse("Activate", f"epoch {epoch.number} is dirty")
            return
        if epoch != self._epoch:
            self._use(epoch, owner_socket)
        phases["gate_s"] = time.monotonic() - began
        began = time.monotonic()
        if self.layout.nbytes <= VERIFIED_AT_ONCE and (damage := self._damage(self.layout, epoch)) is not None:
            self._send(Damaged(self.spec.generation, epoch.number, damage))
            return
        phases["verify_s"] = time.monotonic() - began
        began = time.monotonic()
        self._standing_by = False
        if self.engine.sealing is None:
            # what a dead worker left in its arena is never read, and what it may still write never reaches anybody
            fd = self._owner.arena(self.engine.arena.nbytes, fresh=True)
            self.engine.arena.place(fd, writable=True)
            os.close(fd)
            if self.spec.device != "cpu":  # memory of a GPU comes with whatever was in it before
                self.engine.arena.forget()
            self.engine.forget_prefixes()
        else:
            self._open_sealed(self.engine.sealing, epoch)
        phases["map_s"] = time.monotonic() - began
        self._send(Activated(self.spec.generation, epoch, phases))

    def _open_sealed(self, sealing: Sealing, epoch: Epoch) -> None:
        """Map the arena as the dead worker left it; it must be reaped. Only blocks whose seals verify are read."""
        arena, seals = self._owner.sealed_arena(self.engine.arena.nbytes, sealing.nbytes)
        self._seals = of("cpu").reserve(sealing.nbytes)
        for region, fd in ((self.engine.arena, arena), (self._seals, seals)):
            region.place(fd, writable=True)
            os.close(fd)
        self.engine.forget_prefixes()
        table = self._seals.tensor().numpy().data
        sealing.open(table, self.layout.hash(), epoch.number)

    def _use(self, epoch: Epoch, owner_socket: str) -> None:
        """Look at another clean epoch. The addresses stay, so do all pointers; cached KV belongs to the old weights."""
        self._progress.mark(Phase.PREFILL)
        if owner_socket != self._owner_path:  # the owner was replaced
            self._owner.close()
            for fd in self._slots:
                os.close(fd)
            self._owner, self._owner_path = OwnerClient.connect(Path(owner_socket)), owner_socket
            _state, self._slots = self._owner.weights(when_clean=False)
        self.region.place(self._slots[epoch.slot], writable=False, populate=True)
        self._epoch = epoch
        self.engine.forget_prefixes()
        if self.engine.sealing is not None:
            self.engine.sealing.use_epoch(epoch.number)
        self._progress.mark(Phase.IDLE)

    def _refuse(self, what: str, reason: str) -> None:
        self._send(Refusal(self.spec.generation, what, reason))

    def _send_tokens(self) -> None:
        if self._outbox:
            assert self._epoch is not None
            chunks = self._outbox.take(time.monotonic())
            self._send(Tokens(self.spec.generation, self._epoch.policy_version, chunks))

    def _send(self, message: FromWorker) -> None:
        self._channel.sendall(pack(message))


def _die_of_crashes() -> None:
    """Undo crash handlers that imported libraries installed: one of them keeps a crashed process alive, stuck.

    A traceback of every thread goes to the log instead, and the process ends by the signal, at once. It leaves no core
    file: writing one, arena included, would delay the detection by seconds. (1 and not 0: the kernel heeds only that
    where cores go to a pipe.)
    """
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    small = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (small, small))


def run(channel_fd: int, progress_fd: int) -> None:
    """Be a worker until the driver closes the channel; never returns."""

    def main() -> None:
        channel = socket.socket(fileno=channel_fd)
        lifeline.hold(progress_fd)
        cohort.watch()
        spec, _fds = receive_with_fds(channel, Spec)
        if spec.nice:
            set_nice(spec.nice)
        worker = Worker(spec)
        worker.connect(channel, Progress(progress_fd))
        worker.start()
        worker.run()

    end_with(main)


def end_with(main: Callable[[], None]) -> None:
    """Run `main` and end the process with it, whatever becomes of it; never returns."""
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing of value is left in this process, vLLM's own shutdown takes a second, and what libraries print while
        # they are taken apart would bury the traceback.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
