"""All commands together, and how their errors reach the user.

Exit codes: 0 done; 1 something failed, with one error that says what was kept and what to do; 2 the configuration or
the command line cannot be used; 130 stopped by Ctrl-C or SIGTERM (the run can be resumed).
"""

from __future__ import annotations

import errno
import signal
import sys

from rich.console import Console

from belayer.cli import _commands_bench, _commands_look, _commands_run, _commands_store
from belayer.cli._root import app
from belayer.errors import BelayerError, ConfigError

__all__ = ["app", "main"]

_COMMANDS = (_commands_run, _commands_bench, _commands_look, _commands_store)  # imported, they are known to `app`
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point of the `belayer` command."""
    # so that nothing is left behind then either; commands that have a better answer set their own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(exit_on_error=True, print_error=True)
    except ConfigError as error:
        _print_error(error)
        code = 2
    except BelayerError as error:
        _print_error(error)
        code = 1
    except OSError as error:
        _stderr.print(f"[bold red]error:[/] [bold]{type(error).__name__}[/]")
        _stderr.print(f"{error}\n  next: {_next_step(error)}", markup=False)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _next_step(error: OSError) -> str:
    """What to do about an error of the system that no part of Belayer has explained."""
    match error.errno:
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "check who may read and write there; engine and sandboxes need root"
        case errno.ENOSPC | errno.EDQUOT:
            return "make room there, then do it again; a run goes on with `belayer resume`"
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ENAMETOOLONG:
            return "check the path"
        case _:
            return "`belayer doctor` says what this machine lacks"


def _print_error(error: BelayerError) -> None:
    _stderr.print(f"[bold red]error:[/] [bold]{type(error).__name__}[/]")
    _stderr.print(str(error), markup=False)
