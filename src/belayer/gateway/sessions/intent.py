"""What the journal says about a request besides its tokens: enough to answer a retry and to go on after a crash."""

from __future__ import annotations

import hashlib

import msgspec

from belayer.engine import Sampling
from belayer.errors import JournalCorrupt

_PREFIX = "gateway "


class Intent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a session. Its text is the `asked` of the observation that precedes the model's turn.

    `turn` counts the session's requests from 0. `fingerprint` identifies prompt and parameters. `key` is the client's
    idempotency key. `seeded`: the client chose the seed, so an equal request has equal tokens anyway.
    """

    turn: int
    fingerprint: str
    sampling: Sampling
    seeded: bool = False
    key: str = ""


def fingerprint(prompt_ids: list[int], sampling: Sampling, seeded: bool) -> str:
    """Equal for requests that ask for the same; a seed that the gateway drew does not count."""
    asked = sampling if seeded else msgspec.structs.replace(sampling, seed=0)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode((asked, seeded)))
    digest.update(msgspec.msgpack.encode(prompt_ids))
    return digest.hexdigest()


def write(intent: Intent) -> str:
    return _PREFIX + msgspec.json.encode(intent).decode()


def read(rollout: str, text: str) -> Intent:
    """Raises `JournalCorrupt` for an observation that no gateway wrote."""
    try:
        return msgspec.json.decode(text.removeprefix(_PREFIX), type=Intent)
    except msgspec.DecodeError as error:
        raise JournalCorrupt(
            f"rollout {rollout}: not a request of a gateway: {error}",
            kept="the journal, untouched",
            next_step="give `belayer serve` a run directory of its own",
        ) from None
