"""What to say of an error that the user's function has raised: what, where, and what to do about it."""

from __future__ import annotations

import traceback
from pathlib import Path

from belayer.errors import BelayerError


def where(error: BaseException) -> str:
    """`file:line: message` of the innermost frame that is not Belayer's own, for a one-line report."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not Path(frame.filename).is_relative_to(Path(__file__).parent)] or every
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {words(error)}"


def remedy(error: Exception) -> str:
    """What its author can do about it."""
    if "'coroutine' object" in str(error):
        return "an `await` is missing in the function"
    return getattr(error, "next_step", None) or "repair the function"


def words(error: BaseException) -> str:
    """What happened; what to do is said once, at the end of the whole message."""
    return error.what if isinstance(error, BelayerError) else str(error)
