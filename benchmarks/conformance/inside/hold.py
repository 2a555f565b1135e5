"""Starts resources and asks them: `run.py start|probe|use|damage[,...] NAME...` prints JSON: by action, by name.

Each resource lives in a process of its own, which answers on a socket in its folder. All are forked from one process,
so that starting forty of them takes as long as importing once.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import time
import traceback
from typing import Any

from . import files, kit
from .kit import REGISTRY, Resource

PLACE = os.environ.get("CONFORMANCE_PLACE", "/srv/conformance")
TIMEOUT_S = 40.0
FILES = frozenset(name for name in REGISTRY if files)  # of level `fs`: no process holds them


def load_all() -> None:
    """Import the others too. Who only asks does without: it would take longer than the asking."""
    from . import descriptors, ipc, locks, maps, processes, sockets, states, terminals, tools

    assert all((descriptors, ipc, locks, maps, processes, sockets, states, terminals, tools))


def folder(name: str) -> str:
    return os.path.join(PLACE, name)


def answer(thing: Resource, what: str) -> dict[str, Any]:
    try:
        return {"ok": getattr(thing, what)()}
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} (line {last.lineno} of {os.path.basename(last.filename)})"}


def hold(name: str, ready: int) -> None:
    """The life of a resource's process."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    os.makedirs(folder(name), exist_ok=True)
    os.chdir(folder(name))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(PLACE, f"{name}.ask"))
    listener.listen(4)
    kit.own_fds |= {ready, listener.fileno()}
    thing = REGISTRY[name]()
    result = answer(thing, "setup")
    os.write(ready, json.dumps(result).encode())
    os.close(ready)
    kit.own_fds.discard(ready)
    while "error" not in result:
        asker = listener.accept()[0]
        kit.own_fds.add(asker.fileno())
        what = asker.recv(64).decode()
        data = json.dumps(answer(thing, what)).encode()
        if what == "damage":
            shutil.rmtree(folder(name), ignore_errors=True)
            os.unlink(os.path.join(PLACE, f"{name}.ask"))  # a child of the resource may hold the socket open
        asker.sendall(data)
        kit.own_fds.discard(asker.fileno())
        asker.close()
        if what == "damage":
            os._exit(0)


def start(names: list[str]) -> dict[str, Any]:
    load_all()
    os.makedirs(PLACE, exist_ok=True)
    waiting, results = {}, {}
    for name in names:
        if missing := [program for program in REGISTRY[name].needs if shutil.which(program) is None]:
            results[name] = {"missing": f"the image has no {' and no '.join(missing)}"}
        elif REGISTRY[name].level == "fs":
            os.makedirs(folder(name), exist_ok=True)
            os.chdir(folder(name))
            results[name] = answer(REGISTRY[name](), "setup")
        else:
            read, write = os.pipe()
            if os.fork() == 0:
                if os.fork():  # its parent is the container's init, as with any daemon
                    os._exit(0)
                for other in [read, *waiting.values()]:
                    os.close(other)
                hold(name, write)
                os._exit(1)
            os.close(write)
            os.wait()
            waiting[name] = read
    end = time.monotonic() + TIMEOUT_S
    for name, read in waiting.items():
        # one write is one answer. Not to the end of the pipe: a program that the resource started may hold it too
        there = select.select([read], [], [], max(0.0, end - time.monotonic()))[0]
        data = os.read(read, 1 << 16) if there else b'{"error": "its set-up does not end"}'
        results[name] = json.loads(data or b'{"error": "its process died"}')
        os.close(read)
    return results


def ask(what: str, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    asked: dict[str, socket.socket] = {}
    for name in names:
        if name in FILES:
            continue
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(os.path.join(PLACE, f"{name}.ask"))
            connection.sendall(what.encode())
            asked[name] = connection
        except OSError as error:
            results[name] = {"error": f"its process cannot be asked: {error}"}
    for name in names:
        if name in FILES:
            os.makedirs(folder(name), exist_ok=True)
            os.chdir(folder(name))
            results[name] = answer(REGISTRY[name](), what)
    end = time.monotonic() + TIMEOUT_S
    for name, connection in asked.items():
        data = b""
        try:
            connection.settimeout(max(0.1, end - time.monotonic()))
            while block := connection.recv(1 << 16):
                data += block
            results[name] = json.loads(data or b'{"error": "its process died while it was asked"}')
        except OSError as error:
            results[name] = {"error": f"its process does not answer: {error}"}
        connection.close()
    return results


def main() -> None:
    """`start NAME...`, or actions joined by commas and NAME...; prints the answers to each."""
    actions, *rest = sys.argv[1:]
    print(json.dumps([start(rest) if action == "start" else ask(action, rest) for action in actions.split(",")]))
