"""Retention: what nobody needs any more is taken out of sealed segments.

Of a rollout whose trajectory the trainer has acknowledged, the results of its actions are dropped, or moved to an
archive. Everything else stays: tokens, logprobs, intents, and the digest of each observation, so the run can still be
verified, compared and reported. Records keep their numbers and their order; only results become shorter.

A segment is replaced in one step by a whole, synced one. Before that step it is the old one, after it the new one; the
archive is written and synced earlier. So a crash anywhere leaves a valid journal, and at worst a result in both places.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from belayer.errors import JournalError
from belayer.faults import failpoints
from belayer.journal import archive
from belayer.journal.framing import NO_RESULTS, SEGMENT_HEADER, frame, read_segment, segment_header
from belayer.journal.records import ActionCompleted, Gone, gone_result, result_gone
from belayer.journal.segments import decode, encode

Retention = Literal["keep", "archive", "drop"]


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass did: segments rewritten, results taken out, bytes of those segments (and archives) before, after.

    `error` is empty, or says why the pass ended early; the journal is whole then too.
    """

    segments: int = 0
    results: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    error: str = ""


def compact(segments: Collection[Path], acknowledged: Collection[str], retention: Retention) -> Compacted:
    """Apply `retention` to these segments, which nobody writes to any more. Blocking.

    `acknowledged` names rollouts whose acknowledgement is on the disk already. Raises `OSError`, `JournalError`; the
    segments before the failure are done, the others untouched.
    """
    done = Compacted()
    for path in segments:
        one = _compact_one(path, acknowledged, keep=retention == "archive")
        done = Compacted(
            segments=done.segments + one.segments,
            results=done.results + one.results,
            bytes_before=done.bytes_before + one.bytes_before,
            bytes_after=done.bytes_after + one.bytes_after,
        )
    return done


def _compact_one(path: Path, acknowledged: Collection[str], *, keep: bool) -> Compacted:
    with open(path, "rb") as file:
        head = file.read(SEGMENT_HEADER.size)
        if len(head) == SEGMENT_HEADER.size and SEGMENT_HEADER.unpack(head)[2] & NO_RESULTS:
            return Compacted()  # done in an earlier pass
        data = head + file.read()
    first_seq = SEGMENT_HEADER.unpack_from(data)[3]
    frames: list[bytes] = []
    taken: dict[int, bytes] = {}
    count = left_over = 0
    for seq, _, payload in read_segment(path, data, first_seq, last=False):
        count += 1
        left = payload
        record = decode(payload, path, seq)
        if isinstance(record, ActionCompleted) and not result_gone(record.result):
            if record.rollout in acknowledged:
                taken[seq] = payload
                gone = Gone(len(msgspec.msgpack.encode(record.result)), keep)
                left = encode(msgspec.structs.replace(record, result=gone_result(gone)))
            else:
                left_over += 1
        frames.append(frame(seq, left))
    if not taken and left_over:
        return Compacted()
    held = archive.beside(path)
    before = len(data) + (held.stat().st_size if held.exists() else 0)
    if keep and taken:
        earlier = archive.read(held) if held.exists() else {}
        archive.write(held, first_seq, {**earlier, **taken})
        failpoints.hit("journal.archive.renamed")
    fresh = segment_header(first_seq, 0 if left_over else NO_RESULTS) + b"".join(frames)
    _check(path, fresh, first_seq, count)
    archive.replace_durably(path, fresh, "journal.compact.written")
    failpoints.hit("journal.compact.renamed")
    after = len(fresh) + (held.stat().st_size if held.exists() else 0)
    return Compacted(segments=1, results=len(taken), bytes_before=before, bytes_after=after)


def _check(path: Path, fresh: bytes, first_seq: int, count: int) -> None:
    """What is about to replace a segment must be read back whole."""
    found = 0
    for seq, _, payload in read_segment(path, fresh, first_seq, last=False):
        decode(payload, path, seq)
        found += 1
    if found != count:
        raise JournalError(f"{path}: {count} records became {found} while they were compacted", kept="the old segment")
