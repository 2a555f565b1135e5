"""Frames between driver, owner and workers: a length, a msgpack body, and sometimes file descriptors."""

from __future__ import annotations

import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from belayer.engine.request import Sampling
from belayer.engine.weights.layout import Layout

_HEADER = struct.Struct("<I")
LARGEST_FRAME = 256 << 20


# -- owner ------------------------------------------------------------------------------------------------------------
class Epoch(msgspec.Struct, frozen=True):
    """A weights epoch in the owner's table. Only a clean one may serve."""

    number: int
    slot: int
    clean: bool
    policy_version: int = -1
    digest: str = ""


class Hello(msgspec.Struct, tag=True):
    """Ask the owner how it is; answered by `OwnerState`."""


class Define(msgspec.Struct, tag=True):
    """Fix the layout and allocate both weights slots. Repeating it with the same layout changes nothing."""

    layout: Layout


class Begin(msgspec.Struct, tag=True):
    """Start writing an epoch into the slot that the newest clean one does not use. It is dirty until `Commit`.

    Its number is higher than `after`, so that numbers go on rising when an owner is replaced.
    """

    after: int = 0


class Commit(msgspec.Struct, tag=True):
    """Make the dirty epoch `number` the clean one."""

    number: int
    digest: str
    policy_version: int


class Attach(msgspec.Struct, tag=True):
    """Ask for the descriptors of the weights slots; `when_clean`: answered once a clean epoch exists."""

    when_clean: bool


class Arena(msgspec.Struct, tag=True):
    """Ask for the KV arena of `nbytes`, allocated at the first request.

    `fresh`: for one that nobody else has mapped, in place of the old one.
    """

    nbytes: int
    fresh: bool = False
    seal_bytes: int = 0  # if not 0: the descriptor of a seal table of this size comes second


class OwnerState(msgspec.Struct, tag=True):
    boot_id: str
    pid: int
    layout: Layout | None
    clean: Epoch | None
    dirty: Epoch | None


class Refused(msgspec.Struct, tag=True):
    reason: str


ToOwner = Hello | Define | Begin | Commit | Attach | Arena
FromOwner = OwnerState | Refused


# -- worker -----------------------------------------------------------------------------------------------------------
class Spec(msgspec.Struct):
    """Everything a worker process needs to know at its start."""

    generation: int
    backend: str
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    batch_invariant: bool
    owner_socket: str
    fill: bool  # load the checkpoint into the owner's first epoch
    policy_version: int  # of that first epoch
    nice: int
    scrub_s: float = 30.0  # how often a shadow looks whether the weights still have their digest
    adopt_sealed_blocks: bool = False
    device: str = "cpu"  # where weights, KV arena and computation are: "cpu", "cuda"
    warm: bool = False  # restored from an image: compute a few tokens first, for nobody waits for it


class Work(msgspec.Struct, array_like=True):
    """One request as the worker sees it: everything known of it, prompt and completion so far."""

    id: str  # unique among all that one driver ever submits
    prompt_ids: list[int]
    done_ids: list[int]
    sampling: Sampling


class Activate(msgspec.Struct, tag=True):
    """Become the serving worker: check the epoch, map the arena, forget local state."""

    layout_hash: str
    epoch: Epoch
    owner_socket: str


class Submit(msgspec.Struct, tag=True):
    work: list[Work]


class Abort(msgspec.Struct, tag=True):
    ids: list[str]


class Switch(msgspec.Struct, tag=True):
    """Use another clean epoch, between two steps. `owner_socket` names the owner that holds it."""

    epoch: Epoch
    owner_socket: str


ToWorker = Activate | Submit | Abort | Switch


class Ready(msgspec.Struct, tag=True):
    """Warmed up and attached to `epoch`."""

    generation: int
    layout_hash: str
    epoch: Epoch
    phases: dict[str, float]


class Activated(msgspec.Struct, tag=True):
    generation: int
    epoch: Epoch
    phases: dict[str, float]


class Switched(msgspec.Struct, tag=True):
    generation: int
    epoch: Epoch


class Chunk(msgspec.Struct, array_like=True):
    """What one step added to one request. `start` is the position in the completion of the first token here."""

    id: str
    start: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None


class Tokens(msgspec.Struct, tag=True):
    """The outcome of one step, and the policy version whose weights made it."""

    generation: int
    policy_version: int
    chunks: list[Chunk]


class Adopted(msgspec.Struct, tag=True):
    """What the worker took over of its predecessor's KV blocks: `blocks` that verified, with `tokens` tokens.

    `refused` blocks had a seal and other bytes than it says; they were zeroed and are rebuilt.
    """

    generation: int
    blocks: int
    tokens: int
    refused: int


class Refusal(msgspec.Struct, tag=True):
    """The worker will not go on; `what` names the message it could not honour."""

    generation: int
    what: str
    reason: str


class Damaged(msgspec.Struct, tag=True):
    """The content of epoch `number` no longer has its digest. Whoever says so has stopped using it."""

    generation: int
    number: int
    reason: str


FromWorker = Ready | Activated | Switched | Tokens | Refusal | Damaged | Adopted

T = TypeVar("T")


def pack(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


class Unpacker(Generic[T]):
    """Cuts a byte stream into messages of one type."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Messages completed by `data`. Raises `ValueError` for a frame no peer of ours would send."""
        self._buffer += data
        messages: list[T] = []
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, position)
            if length > LARGEST_FRAME:
                raise ValueError(f"frame of {length} bytes: the stream is damaged")
            end = position + _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[position + _HEADER.size : end]))
            position = end
        del self._buffer[:position]
        return messages


def send_with_fds(connection: socket.socket, message: Any, fds: list[int]) -> None:
    """Send one frame; `fds` travel with its first byte."""
    data = pack(message)
    sent = socket.send_fds(connection, [data], fds) if fds else connection.send(data)
    connection.sendall(data[sent:])


def receive_with_fds(connection: socket.socket, kind: Any) -> tuple[Any, list[int]]:
    """Receive one frame and the descriptors that came with it. Raises `EOFError` when the peer is gone."""
    head, fds, _flags, _address = socket.recv_fds(connection, _HEADER.size, 8)
    while len(head) < _HEADER.size:
        more = connection.recv(_HEADER.size - len(head))
        if not more:
            raise EOFError("the peer closed the connection")
        head += more
    (length,) = _HEADER.unpack(head)
    body = bytearray()
    while len(body) < length:
        more = connection.recv(min(1 << 20, length - len(body)))
        if not more:
            raise EOFError("the peer closed the connection")
        body += more
    return msgspec.msgpack.decode(body, type=kind), list(fds)
