"""A process that runs one backend, the way a worker does, and does what the suite asks of it.

python tests/contract/backend_kit.py CONNECTION_FD        (the process; `BackendHost` starts it)
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from belayer.config import EngineConfig
from belayer.engine._wire import Chunk, Spec, Work
from belayer.engine.exactness import is_exact
from belayer.engine.request import Sampling
from belayer.engine.workers.child import environment
from belayer.ownership import RunLabel, own_dir

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


def spec_of(config: EngineConfig) -> Spec:
    """What the first worker of an engine with this configuration is told, but for an owner: the suite has none."""
    return Spec(
        generation=1,
        backend=config.backend,
        device=config.device,
        model=str(config.model),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_bytes=config.kv_bytes,
        batch_invariant=is_exact(config),
        owner_socket="",
        fill=True,
        policy_version=0,
        nice=0,
    )


class BackendHost:
    """The suite's hand on that process. Every method raises `RuntimeError` with the traceback of what failed there."""

    def __init__(self, spec: Spec, label: RunLabel) -> None:
        self.spec = spec
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        env = environment(label, 2, spec.batch_invariant)
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env["PYTHONPATH"]])
        env["TMPDIR"] = str(label.dir / "tmp")
        Path(env["TMPDIR"]).mkdir(exist_ok=True)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self.threads_after_preload: int = self.ask("start", spec)

    def ask(self, what: str, *arguments: Any) -> Any:
        self._connection.send((what, arguments))
        if not self._connection.poll(TIMEOUT_S):
            raise RuntimeError(f"{what} takes more than {TIMEOUT_S:g} s")
        ok, answer = self._connection.recv()
        if not ok:
            raise RuntimeError(answer)
        return answer

    def run(self, work: list[Work]) -> dict[str, Outcome]:
        """Submit all at once and step until nothing is left."""
        return outcomes(work, self.ask("complete", work))

    def close(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()


class Outcome:
    """A completion, with what was known of it before."""

    def __init__(self, work: Work) -> None:
        self.tokens = list(work.done_ids)
        self.logprobs: list[float] = []
        self.reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        assert self.reason is None, f"{chunk.id} goes on after its end"
        assert chunk.start == len(self.tokens), f"{chunk.id}: a chunk at {chunk.start} after {len(self.tokens)} tokens"
        assert len(chunk.token_ids) == len(chunk.logprobs)
        assert chunk.token_ids or chunk.finish_reason
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.reason = chunk.finish_reason


def outcomes(work: list[Work], chunks: list[Chunk]) -> dict[str, Outcome]:
    """What `chunks`, in the order they came, say about `work`. Refuses gaps, repetitions and strangers."""
    result = {item.id: Outcome(item) for item in work}
    for chunk in chunks:
        result[chunk.id].add(chunk)
    return result


class _Process:
    """Runs there; every public method is a command."""

    def start(self, spec: Spec) -> int:
        from belayer.engine import backends

        backends.preload(spec.backend)
        threads = len(os.listdir("/proc/self/task"))
        from belayer.engine import memory
        from belayer.engine.backends.owned_weights import OwnedWeights

        self.memory = memory.of(spec.device)
        self.weights = OwnedWeights(fill=True, batch_invariant=spec.batch_invariant, device=spec.device)
        self.weights.attach = self._attach
        self.backend = backends.make(spec, self.weights)
        return threads

    def _attach(self, region: Any, nbytes: int, layout: Any) -> Any:
        from belayer.engine.memory import Scratch

        self.files_half_way = self._files()
        epoch = self.memory.allocate("belayer-test-weights", nbytes)
        target = self.memory.reserve(nbytes, Scratch.NONE)
        target.place(epoch.fd, writable=True)
        target.copy_from(region)
        target.close()
        region.place(epoch.fd, writable=False, populate=True)
        epoch.close()
        return layout

    def _files(self) -> list[str]:
        """By which ranks find one another: as we have them, and as vLLM would, for temporary files are there too."""
        folder = own_dir()
        assert folder is not None
        found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        return [name for name in found if "rendezvous" in name or "vllm_dist" in name]

    def files(self) -> tuple[list[str], list[str]]:
        """Such files while the model was being made, and now."""
        return self.files_half_way, self._files()

    def refusal(self, spec: Spec) -> str:
        """What the backend says to a `spec` that it cannot serve; empty if it can."""
        from belayer.engine import backends
        from belayer.engine.backends.owned_weights import OwnedWeights
        from belayer.errors import EngineError

        weights = OwnedWeights(fill=True, batch_invariant=spec.batch_invariant, device=spec.device)
        weights.attach = self._attach
        try:
            backends.make(spec, weights)
        except EngineError as error:
            return str(error)
        return ""

    def warm_up(self) -> None:
        self.backend.warm_up()

    def use_weights(self, folder: Path) -> None:
        """Put another epoch under the model, as a weights update does."""
        from belayer.engine.memory import Scratch
        from belayer.engine.weights.checkpoint_files import checkpoint_tensors
        from belayer.engine.weights.first_epoch import copy_tensors

        assert self.weights.layout is not None and self.weights.region is not None
        epoch = self.memory.allocate("belayer-test-weights", self.weights.layout.nbytes)
        target = self.memory.reserve(self.weights.layout.nbytes, Scratch.NONE)
        target.place(epoch.fd, writable=True)
        target.forget()
        copy_tensors(self.weights.layout, target, checkpoint_tensors(folder))
        target.close()
        self.weights.region.place(epoch.fd, writable=False)
        epoch.close()
        self.backend.forget_prefixes()

    def use_new_arena(self, fill: int) -> None:
        """Map another arena, full of bytes `fill`, as a promotion does."""
        arena = self.memory.allocate("belayer-test-arena", self.backend.arena.nbytes)
        self.backend.arena.place(arena.fd, writable=True)
        arena.close()
        self.backend.arena.tensor().fill_(fill)
        self.backend.forget_prefixes()

    def arena_bytes_other_than(self, fill: int) -> int:
        return int((self.backend.arena.tensor() != fill).sum())

    def submit(self, work: list[Work]) -> None:
        for item in work:
            self.backend.submit(item)

    def abort(self, ids: list[str]) -> None:
        self.backend.abort(ids)

    def forget_prefixes(self) -> None:
        self.backend.forget_prefixes()

    def state(self) -> tuple[bool, bool]:
        return self.backend.busy, self.backend.prefilling

    def computed_tokens(self) -> int:
        return self.backend.computed_tokens

    def step(self, count: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for _ in range(count):
            chunks += self.backend.step()
        return chunks

    def complete(self, work: list[Work], forget_after: int = 0) -> list[Chunk]:
        """Submit `work` and step until nothing is left; drop all prefixes after `forget_after` steps."""
        self.submit(work)
        chunks: list[Chunk] = []
        steps = 0
        while self.backend.busy:
            chunks += self.backend.step()
            steps += 1
            if steps == forget_after:
                self.backend.forget_prefixes()
            assert steps < 20_000, "it is busy for ever"
        return chunks


def requests(count: int, max_tokens: int, vocabulary: int, tag: str = "r") -> list[Work]:
    """Greedy and sampled ones of several lengths; the longest span several blocks of the cache."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"seed": 11},
        {"seed": 12, "temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"seed": 13, "temperature": 1.3, "min_p": 0.02},
        {"seed": 14, "temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    )
    return [
        Work(
            f"{tag}{i}",
            [(7 * j + 31 * i) % vocabulary for j in range(9 + 90 * (i % 5))],
            [],
            Sampling(max_tokens=max_tokens, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


def main(fd: int) -> None:
    connection = Connection(fd)
    process = _Process()
    with contextlib.suppress(EOFError):
        while True:
            what, arguments = connection.recv()
            try:
                answer = (True, getattr(process, what)(*arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            connection.send(answer)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
