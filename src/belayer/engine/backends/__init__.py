"""What makes tokens inside a worker: one small protocol, several inference engines behind it.

`Backend` is all that a worker knows of an inference engine. A backend runs in one thread, on weights that lie in an
owner's epoch and on one raw KV allocation, the arena, whose backing can be exchanged under it.
"""

# Importing this package must stay cheap: the driver asks it for names, only the nursery loads an engine.

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from belayer.engine._wire import Chunk, Spec, Work
    from belayer.engine.backends.owned_weights import OwnedWeights
    from belayer.engine.memory import Region

__all__ = ["Backend", "Sealing", "make", "preload"]


class Sealing(Protocol):
    """How a backend seals its KV blocks, and adopts those that a dead worker sealed (`belayer.engine.memory.seals`)."""

    @property
    def nbytes(self) -> int:
        """Size of the seal table."""
        ...

    def open(self, table: memoryview, layout_hash: str, epoch: int, /) -> int:
        """Use `table` and the arena that lies under `Backend.arena` now, both as the last worker left them.

        From here on `Backend.submit` adopts blocks whose seals are of weights epoch `epoch` and verify, and nothing
        else in the arena is ever read. Returns how many blocks have such a seal.
        """
        ...

    def seal(self) -> None:
        """Seal what the last step computed. Called when its tokens are sent."""
        ...

    def use_epoch(self, epoch: int) -> None:
        """Other weights are in place: void every seal; the next ones are of `epoch`."""
        ...

    def adopted(self) -> tuple[int, int, int] | None:
        """Blocks and tokens adopted and blocks refused since the last call; None if nothing happened."""
        ...


class Backend(Protocol):
    """One model, one scheduler, one thread. Any exception a method raises ends the worker process."""

    @property
    def arena(self) -> Region:
        """The KV cache's address range. A shadow has it on private scratch memory."""
        ...

    @property
    def sealing(self) -> Sealing | None:
        """None: it was not asked for, or this backend cannot."""
        ...

    @property
    def computed_tokens(self) -> int:
        """Tokens that steps have computed so far, prefill included; what a cache answered is not among them."""
        ...

    def submit(self, work: Work) -> None:
        """Queue a request; what is known of its completion becomes part of the prefill."""
        ...

    def abort(self, ids: list[str]) -> None:
        """Forget these requests; unknown ids are ignored, for a request may have ended meanwhile."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        ...

    @property
    def prefilling(self) -> bool:
        """Whether the next step has a prompt, or part of one, to work through."""
        ...

    def step(self) -> list[Chunk]:
        """One forward pass; what became of every request that advanced."""
        ...

    def forget_prefixes(self) -> None:
        """Drop every cached prefix; requests in flight rebuild theirs, with the weights now in place."""
        ...

    def warm_up(self) -> None:
        """Run every kind of step once, on scratch memory, and leave no trace of it."""
        ...


def preload(name: str) -> None:
    """Import everything a worker with this backend needs. Starts no thread, for workers are forked afterwards."""
    _module(name)


def make(spec: Spec, weights: OwnedWeights) -> Backend:
    """Build the model on `weights` and its scheduler, as `spec` says."""
    return _module(spec.backend).build(spec, weights)


def _module(name: str):
    if name == "vllm":
        from belayer.engine.backends.vllm import core

        return core
    if name == "transformers":
        from belayer.engine.backends.transformers import core

        return core
    raise ValueError(f"no backend is called {name}")
