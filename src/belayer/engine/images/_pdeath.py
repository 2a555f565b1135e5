"""Takes the request to die with its parent out of a dumped process.

CRIU restores it with the process, while it still traces the others of the namespace. A parent that dies at that moment
takes process 1 with it, which cannot end before its tracer has let the dead others go, and the tracer waits for it.
"""

from __future__ import annotations

import signal
from pathlib import Path

from belayer import protobuf as pb

_THREAD_CORE, _PDEATH_SIGNAL = 5, 8  # criu/images/core.proto: core_entry, thread_core_entry


def clear(images: Path, pid: int) -> None:
    """Change the image of process `pid` (its number inside). Raises `ValueError` when it never asked for SIGKILL."""
    path = images / f"core-{pid}.img"
    magics, (core,) = pb.read_image(path)
    fields = pb.parse(core)
    (thread,) = (pb.parse(message) for message in pb.messages(fields, _THREAD_CORE))
    if pb.numbers(thread).get(_PDEATH_SIGNAL) != signal.SIGKILL:
        raise ValueError(f"process {pid} of the image does not die with its parent")
    without = pb.build(field for field in thread if field[0] != _PDEATH_SIGNAL)
    pb.write_image(
        path,
        magics,
        [pb.build((number, wire, without if number == _THREAD_CORE else value) for number, wire, value in fields)],
    )
