"""What differs from round to round of the joint campaign: how a run is configured, and which failpoints it comes to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from belayer.faults.joint_kinds import pairs

from ._joint_task import COMMAND_TIMEOUT_S, described
from ._models import Model

CONCURRENT = 20
SEGMENT_BYTES = 64 << 10  # a round writes about a megabyte: its journal goes through many segments


class Setting(NamedTuple):
    """Of one round. `durable`: checkpoints are written through to the disk in the background."""

    policy: str
    durable: bool
    retention: Literal["keep", "archive", "drop"]

    def comes_to(self, point: str) -> bool:
        """Whether a run of this round can pass the failpoint."""
        if point.startswith("checkpoint.write."):
            return self.durable
        if point.startswith("checkpoint.move."):
            return not self.durable  # images that are on the disk already are not moved there
        if point.startswith("journal.archive."):
            return self.retention == "archive"
        if point.startswith("journal.compact."):
            return self.retention != "keep"
        return True


CALM = Setting("never", durable=False, retention="keep")
_POLICIES = ("always", "always", "every-n", "always")
_RETENTIONS: tuple[Literal["keep", "archive", "drop"], ...] = ("archive", "drop", "archive", "keep", "archive")


def setting(number: int) -> Setting:
    """Of round `number`; its three parts change at their own paces, so that in time all meet."""
    return Setting(
        _POLICIES[number % len(_POLICIES)],
        durable=number % 3 == 2,
        retention=_RETENTIONS[number % len(_RETENTIONS)],
    )


def plan(seed: int, rollouts: int) -> str:
    """A digest of everything that the outcomes of a campaign depend on, so that only the same one is gone on with."""
    text = repr((seed, rollouts, pairs(), described()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def config(how: Setting, model: Model, folder: Path, seed: int) -> dict[str, Any]:
    """The configuration of a run, as `Config` takes it. Deadlines are short, so that hangs cost seconds."""
    return {
        "run": {
            "seed": seed,
            "max_concurrent": CONCURRENT,
            "durability": "host" if how.durable else "process",
            "retention": how.retention,
            "segment_bytes": SEGMENT_BYTES,
        },
        "engine": {
            "model": str(folder),
            "max_model_len": model.max_model_len,
            "max_num_seqs": model.max_num_seqs,
            "kv_bytes": model.kv_bytes,
            "hang_s": 1.5,
            "prefill_hang_s": 6.0,
            "promote_timeout_s": 3.0,
            "threads": 1,
            "images": True,
        },
        # so little memory for images that the heavy ones of `_joint_task` push others out to the disk
        "sandbox": {"memory_bytes": 256 << 20, "images_bytes": 64 << 20, "exec_timeout_s": COMMAND_TIMEOUT_S},
        "policy": {"name": how.policy},
        "recovery": {"infra_retries": 60, "attempts": 3, "breaker": 500},
    }
