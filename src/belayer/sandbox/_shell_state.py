"""What of the persistent shell is kept without CRIU: written down by the shell itself, and read back by a fresh one.

Kept: directory, variables with their attributes, functions, aliases, options, traps, umask, positional parameters and
the last exit status. Not kept: jobs, open files, the directory stack, command completion.

The description is a script for bash. It goes through a file, because background jobs may write to the terminal at any
time; the file is gone before the file system is captured.
"""

from __future__ import annotations

import os
import secrets

from belayer.errors import CheckpointRefused, RestoreFailed
from belayer.sandbox._session import DEFAULT_ENV, Session

LIMIT = 4 << 20  # bytes of the description
TIMEOUT_S = 10.0
GRACE_S = 5.0
_DONE = b"# belayer: complete\n"

# names that bash itself fills or that belong to the shell's driver (native/shell.c)
_OWN = (
    "BASH|BASHOPTS|BASHPID|BASH_A*|BASH_CMDS|BASH_COMMAND|BASH_LINENO|BASH_LOADABLES_PATH|BASH_MONOSECONDS|BASH_REMATCH"
    "|BASH_SOURCE|BASH_SUBSHELL|BASH_TRAPSIG|BASH_VERSINFO|BASH_VERSION|COMP_WORDBREAKS|DIRSTACK|EPOCHREALTIME"
    "|EPOCHSECONDS|EUID|FUNCNAME|GROUPS|HISTCMD|HOSTNAME|HOSTTYPE|LINENO|MACHTYPE|OSTYPE|PIPESTATUS|PPID"
    "|PROMPT_COMMAND|PS1|PS2|PWD|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_|_BLY_*"
)

# `set -eux` would end the shell or write to the terminal; they come back in the last lines, and so does the exit
# status. `builtin`, since an agent may have aliases and functions with such names
_WRITE = r"""
{ _BLY_K=$? _BLY_F=$-; builtin set +eux; } 2>/dev/null
_BLY_T=$(builtin trap -p); builtin trap - DEBUG ERR RETURN
(
    [[ $PWD -ef . ]] || exit
    builtin shopt -p
    _BLY_L=' '
    while IFS= builtin read -r _BLY_V; do _BLY_L+="$_BLY_V "; done < <(builtin compgen -e)
    builtin printf '_BLY_L=%q\n' "$_BLY_L"
    builtin echo 'while IFS= read -r _BLY_V; do'
    builtin echo 'case $_BLY_L in *" $_BLY_V "*) ;; *) unset -v "$_BLY_V";; esac; done < <(compgen -e)'
    while IFS= builtin read -r _BLY_V; do
        case $_BLY_V in @OWN@) continue;; esac
        builtin declare -p -- "$_BLY_V"
    done < <(builtin compgen -v)
    builtin printf 'umask %s\n' "$(builtin umask)"
    builtin printf 'cd -- %q && printf "belayer: there\\n"\n' "$PWD"
    if [[ -v OLDPWD ]]; then builtin printf 'OLDPWD=%q\n' "$OLDPWD"; fi
    if (($#)); then builtin printf 'set --'; builtin printf ' %q' "$@"; builtin echo; fi
    builtin set +o
    builtin echo 'unset _BLY_L _BLY_V'
    builtin printf '%s\n' "$_BLY_T"
    builtin declare -f
    builtin declare -Fx
    builtin alias -p
    for _BLY_V in u x e; do case $_BLY_F in *$_BLY_V*) builtin printf 'builtin set -%s\n' "$_BLY_V";; esac; done
    case $_BLY_F in *e*) ;; *) builtin printf '_bly_status %s\n' "$_BLY_K";; esac
    builtin echo '# belayer: complete'
) >| @FILE@ 2>/dev/null </dev/null
{
    builtin eval "$_BLY_T"
    builtin unset _BLY_T _BLY_V
    case $_BLY_F in *u*) builtin set -u;; esac
    case $_BLY_F in *x*) builtin set -x;; esac
} 2>/dev/null
case $_BLY_F in *e*) builtin set -e;; *) _bly_status "$_BLY_K";; esac
"""


async def save_shell(session: Session, name: str) -> tuple[bytes, bytes]:
    """The shell's state as a script, and what its background jobs had said that nobody has heard yet.

    The shell goes on as it was. Raises `CheckpointRefused`, `SandboxLost`.
    """
    file = f"/run/.belayer-shell-{secrets.token_hex(8)}"
    script = _WRITE.replace("@OWN@", _OWN).replace("@FILE@", file)
    written = await session.shell(script, timeout_s=TIMEOUT_S, grace_s=GRACE_S, limit=1 << 17)
    found = await session.exec(
        ["read", file], cwd="/", env={}, timeout_s=TIMEOUT_S, grace_s=GRACE_S, limit=LIMIT + 1, builtin=True
    )
    remove = ["/bin/rm", "-f", file]
    await session.exec(remove, cwd="/", env=DEFAULT_ENV, timeout_s=TIMEOUT_S, grace_s=GRACE_S, limit=1 << 10)
    if found.exit_code == 0 and len(found.stdout) <= LIMIT and found.stdout.endswith(_DONE):
        return found.stdout, written.stdout
    if written.timed_out or written.shell_ended:
        why = "it does not answer"
    elif len(found.stdout) > LIMIT:
        why = f"its variables and functions are larger than {LIMIT >> 20} MB"
    else:
        why = "it cannot write its state down (is its directory deleted, or the disk full?)"
    raise CheckpointRefused(
        f"the shell of sandbox {name} cannot be captured: {why}", kept="the sandbox and its earlier checkpoints"
    )


async def load_shell(session: Session, name: str, script: bytes) -> None:
    """Make a fresh shell what `save_shell` described. Raises `RestoreFailed`, `SandboxLost`."""
    text = os.fsdecode(script).replace("'", "'\\''")
    # errors of single statements (an option that this bash does not have) are not worth a whole restore
    result = await session.shell(
        f"{{ builtin eval '{text}'; }} 2>/dev/null", timeout_s=TIMEOUT_S, grace_s=GRACE_S, limit=1 << 16
    )
    if result.timed_out or result.shell_ended or b"belayer: there\n" not in result.stdout:
        raise RestoreFailed(f"the shell of sandbox {name} did not take its state back: {result.text[:200]!r}")
