"""What tells the forks of one sandbox apart: host name, network, and a seed for whoever draws random numbers.

Forks begin as exact copies, so everything that a program keeps in its memory is the same in all of them: the state of
Python's `random`, of numpy, of OpenSSL. The kernel's own randomness (/dev/urandom, getrandom) is not. Each fork is told
what it is, in this order, before anybody gets its handle:

1. its host name is set, and /etc/hosts knows it;
2. the file /run/belayer/fork is written: JSON with `fork` (1 … of), `of`, `hostname`, `checkpoint`, `seed` (64 hex
   digits, different in every fork) and `time` (Unix time). A program that cares watches it, e.g. with inotify;
3. every executable in /etc/belayer/after-fork.d is run, in the order of the names, with BELAYER_FORK, BELAYER_FORKS,
   BELAYER_HOSTNAME and BELAYER_SEED in its environment. If one fails, the fork as a whole does.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING

from belayer.errors import SandboxError

if TYPE_CHECKING:
    from belayer.sandbox.container import Sandbox

NOTICE = "/run/belayer/fork"
HOOKS = "/etc/belayer/after-fork.d"
HOOKS_TIMEOUT_S = 30.0
_CLONE_NEWUTS = 0x04000000
_LONGEST = 63
_FAILED = 97  # exit code that means: a hook
# one command, since it delays a whole group. What an agent has made of /run and /etc is its own affair; hooks are not
_TELL = f"""
{{
    [ -d {NOTICE.rpartition("/")[0]} ] || mkdir -p {NOTICE.rpartition("/")[0]}
    printf '%s\\n' "$BELAYER_NOTICE" > {NOTICE}
    printf '127.0.0.1 %s\\n' "$BELAYER_HOSTNAME" >> /etc/hosts
}} 2>/dev/null
unset BELAYER_NOTICE
status=0
for hook in {HOOKS}/*; do
    [ -f "$hook" ] && [ -x "$hook" ] || continue
    "$hook" </dev/null || {{ echo "$hook ended with exit code $?" >&2; status={_FAILED}; }}
done
exit $status
"""
_libc = ctypes.CDLL(None, use_errno=True)


def fork_hostname(parent: str, number: int) -> str:
    """Of fork `number` (from 1): the same in every run, and different from its siblings'."""
    name = f"{parent}-{number}"
    return name if len(name) <= _LONGEST else f"{parent[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def set_hostname(init_pid: int, hostname: str) -> None:
    """Set the host name of the container whose init this is. Raises `OSError`. Blocking.

    In a thread of its own, which ends in the container's namespace and takes no other work.
    """
    failures: list[OSError] = []

    def work() -> None:
        try:
            fd = os.open(f"/proc/{init_pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = hostname.encode()
                if _libc.setns(fd, _CLONE_NEWUTS) or _libc.sethostname(data, ctypes.c_size_t(len(data))):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), hostname)
            finally:
                os.close(fd)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="belayer-hostname")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


async def tell_fork(sandbox: Sandbox, number: int, of: int, checkpoint: str) -> None:
    """Tell a fork, whose host name is set already, what it is. Raises `SandboxError` when one of its hooks fails."""
    seed = secrets.token_hex(32)
    notice = {
        "fork": number,
        "of": of,
        "hostname": sandbox.hostname,
        "checkpoint": checkpoint,
        "seed": seed,
        "time": time.time(),
    }
    env = {
        "BELAYER_FORK": str(number),
        "BELAYER_FORKS": str(of),
        "BELAYER_HOSTNAME": sandbox.hostname,
        "BELAYER_SEED": seed,
        "BELAYER_NOTICE": json.dumps(notice),
    }
    result = await sandbox.exec(["/bin/sh", "-c", _TELL], env=env, timeout_s=HOOKS_TIMEOUT_S, cwd="/")
    # another exit code: a sandbox without a usable /bin/sh can have no hooks either
    if result.exit_code == _FAILED or result.timed_out:
        why = "a hook did not end in time" if result.timed_out else result.text.strip()[-500:]
        raise SandboxError(
            f"fork {number} of {of} could not be told that it is one: {why}",
            kept=f"checkpoint {checkpoint} and the sandbox that was to be forked",
            next_step=f"mend or remove the executables in {HOOKS} of the sandbox",
        )
