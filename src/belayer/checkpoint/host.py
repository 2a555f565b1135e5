"""Which machine made a checkpoint's process images, and can this one take them over?

Restored code goes on with what it found out about its CPU at its start, and CRIU's images name what the kernel must be
able to do. So a host that restores has the same architecture, at least the same instruction sets, and a kernel and a
CRIU that are not older.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import msgspec

# flags of /proc/cpuinfo that programs choose their code by; the others say what the kernel or a hypervisor does
_INSTRUCTIONS = re.compile(
    r"(pni|sse\w*|ssse3|avx\w*|aes|pclmulqdq|bmi\d|fma|f16c|popcnt|movbe|adx|abm|sha_ni|sha512|sm[34]|vaes|vpclmulqdq"
    r"|gfni|amx_\w+|xsave(opt|c|s)?|pku|ospke|rdrand|rdseed|rdpid|fsgsbase|cx16|rtm|hle|clflushopt|clwb|movdir\w+|serialize"
    r"|waitpkg|erms|fsrm|lahf_lm|rdtscp|fxsr|user_shstk)"
)


class Host(msgspec.Struct, frozen=True):
    """`kernel` is its release, `cpu` the instruction sets that programs can see, `criu` its version as in "4.2.1"."""

    machine: str
    kernel: str
    cpu: list[str]
    criu: str


def this_host(criu: str) -> Host:
    """The machine that we run on; `criu` is the version of the program in use."""
    system = os.uname()
    return Host(system.machine, system.release, _instruction_sets(), criu)


def misfits(made_on: Host, here: Host) -> list[str]:
    """Why process images of `made_on` cannot be restored `here`; empty when they can, as far as one can know."""
    if made_on.machine != here.machine:
        return [f"it was made on {made_on.machine}, this is {here.machine}"]
    found = []
    missing = sorted(set(made_on.cpu) - set(here.cpu))
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        found.append(f"this CPU lacks {shown}")
    if _numbers(here.kernel)[:2] < _numbers(made_on.kernel)[:2]:
        found.append(f"it was made on kernel {made_on.kernel}, this is {here.kernel}")
    if _numbers(here.criu) < _numbers(made_on.criu):
        found.append(f"it was made by CRIU {made_on.criu}, here is {here.criu}")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()


@cache
def _instruction_sets() -> list[str]:
    """Of the first CPU: x86 calls them flags, arm64 Features (there every one of them is an instruction set)."""
    with open(Path("/proc/cpuinfo")) as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "Features":
                return sorted(value.split())
            if key.strip() == "flags":
                return sorted(flag for flag in value.split() if _INSTRUCTIONS.fullmatch(flag))
    return []
