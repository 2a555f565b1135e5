"""What lies behind the last record of a journal: nothing, the torn write of a killed driver, or damage."""

from __future__ import annotations

from pathlib import Path

import msgspec

from belayer.journal.framing import SEGMENT_HEADER, begins_frame, read_segment
from belayer.journal.segments import segment_files


class Tail(msgspec.Struct, frozen=True):
    """Bytes that are no record, behind `records` readable ones. `torn`: a write that was cut off can have left them."""

    nbytes: int
    records: int
    torn: bool

    def __str__(self) -> str:
        place = f"after record {self.records - 1}" if self.records else "where the first record must be"
        what = "the torn write of a killed driver, or damage" if self.torn else "damage, for no write begins like that"
        return f"{self.nbytes} bytes {place} are not readable: {what}"


def read_tail(folder: Path) -> Tail | None:
    """What the journal in `folder` ends with; None where it ends with a record, or has none.

    Not to be asked beside a living writer, which may be in the middle of a write. Raises like `scan`, for damage of the
    newest segment.
    """
    files = segment_files(folder)
    if not files:
        return None
    path = files[-1]
    data = path.read_bytes()
    whole_header = len(data) >= SEGMENT_HEADER.size
    records = SEGMENT_HEADER.unpack_from(data)[3] if whole_header else int(path.stem)
    end = SEGMENT_HEADER.size if whole_header else 0
    for seq, offset, _ in read_segment(path, data, records, last=True):
        records, end = seq + 1, offset
    rest = data[end:]
    if not rest:
        return None
    return Tail(len(rest), records, torn=not whole_header or begins_frame(rest, records))
