"""The gate between podman's runtime and CRIU, with a program in CRIU's place that says what it was asked."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from belayer.errors import CheckpointRefused, SandboxUnavailable
from belayer.sandbox._native import native_program
from belayer.sandbox.podman._spec import CRIU_CONF, DESCRIPTORS, FILE, FILE_LIMIT, Moved, keep_files, prepare_bundle


def _no_program() -> str:
    try:
        native_program()
    except SandboxUnavailable as error:
        return error.what
    return ""


pytestmark = [pytest.mark.contract, pytest.mark.skipif(bool(_no_program()), reason=f"no program: {_no_program()}")]

# gets the request, gives notice of each stop, and at the end says what it got
CRIU = f"""#!{sys.executable}
import json, os, socket, sys
if sys.argv[1] != "swrk":
    print("other", *sys.argv[1:])
    sys.exit(3)
sock = socket.socket(fileno=int(sys.argv[2]))
request = sock.recv(1 << 16)
pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
heard = []
for name in (b"pre-dump", b"network-lock", b"post-dump"):
    inner = b"\\x0a" + bytes([len(name)]) + name
    sock.send(b"\\x08\\x06\\x10\\x01\\x2a" + bytes([len(inner)]) + inner)
    heard.append(sock.recv(1 << 16).hex())
    if heard[-1].endswith("1800"):
        break
seen = sorted(os.path.basename(os.readlink(f"/proc/{{pid}}/fd/{{n}}")) for n in os.listdir(f"/proc/{{pid}}/fd")
    if os.path.isdir(f"/proc/{{pid}}/fd/{{n}}"))
sock.send(json.dumps([request.hex(), heard, seen]).encode())
"""
YES = bytes([8, 6, 24, 1])  # criu_req: type = NOTIFY, notify_success = true


def field(number: int, content: bytes | int) -> bytes:
    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def request(*, freezer: bool) -> bytes:
    options = field(1, 7) + field(2, 12345) + field(10, b"dump.log" * 40)
    if freezer:
        options += field(44, b"/sys/fs/cgroup/freezer/x" * 9)
    return field(1, 1) + field(2, options + field(51, b"criu.conf"))


async def through_the_gate(tmp_path: Path, answers: dict[bytes, bytes]) -> tuple[list, list[bytes], list[bytes]]:
    """(what CRIU says, the stops that the host was told of, the names of the notices that the runtime got)."""
    criu = tmp_path / "criu"
    criu.write_text(CRIU)
    criu.chmod(0o755)
    stops: list[bytes] = []

    async def host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stops.append(await reader.read(1))
        writer.write(answers[stops[-1]])
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(host, path=tmp_path / "host")
    images = tmp_path / "the-images"
    images.mkdir(exist_ok=True)
    folder = os.open(images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the runtime's, not inherited
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(20)
    command = [str(native_program()), "gate", str(tmp_path / "host"), str(criu), "swrk", str(theirs.fileno())]
    gate = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    notices = []
    try:
        theirs.close()
        ours.send(request(freezer=True))
        while True:
            data = await asyncio.to_thread(ours.recv, 1 << 16)
            if data[:1] == b"[":
                break
            notices.append(data[8:])
            ours.send(YES)
        assert await asyncio.to_thread(gate.wait, 10) == 0
        return json.loads(data), stops, notices
    finally:
        gate.kill()
        gate.wait()
        ours.close()
        os.close(folder)
        server.close()


def test_a_dump_stops_twice_and_its_request_loses_the_freezer(tmp_path):
    said, stops, notices = asyncio.run(through_the_gate(tmp_path, {b"f": b"k", b"d": b"k"}))
    got, heard, seen = said
    assert stops == [b"f", b"d"]
    assert len(notices) == 3 and heard == [YES.hex()] * 3, "the runtime hears of all of it too"
    assert bytes.fromhex(got) == request(freezer=False)
    assert "the-images" in seen, "CRIU finds the caller's folders by the caller's numbers"


@pytest.mark.parametrize("stop", [b"f", b"d"])
def test_the_host_can_refuse_at_each_stop(tmp_path, stop):
    said, stops, notices = asyncio.run(through_the_gate(tmp_path, {b"f": b"k", b"d": b"k", stop: b"n"}))
    assert stops[-1] == stop and said[1][-1] == "08061800"
    assert len(notices) == (1 if stop == b"f" else 2), "the runtime does not hear of a stop that failed"


def test_other_commands_are_passed_on(tmp_path):
    criu = tmp_path / "criu"
    criu.write_text(CRIU)
    criu.chmod(0o755)
    command = [str(native_program()), "gate", "/nowhere", str(criu), "--version"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "other --version\n")


def test_the_specification_follows_its_container(tmp_path):
    bundle, images, work, fresh = (tmp_path / name for name in ("bundle", "images", "work", "fresh"))
    for folder in (bundle, images, work, fresh):
        folder.mkdir()
    hostname = tmp_path / "hostname"
    hostname.write_bytes(b"changed\n\xff")
    mounts = [
        {"destination": "/etc/hostname", "type": "bind", "source": str(hostname)},
        {"destination": "/run/agent", "type": "bind", "source": "/old/agent"},
        {"destination": "/proc", "type": "proc", "source": "proc"},
    ]
    namespaces = [{"type": "pid"}, {"type": "network", "path": "/run/netns/old"}]
    spec = {
        "root": {"path": "/old/root"},
        "mounts": mounts,
        "annotations": {CRIU_CONF: "/old/criu.conf"},
        "linux": {"cgroupsPath": "/old", "namespaces": namespaces},
    }
    (bundle / "config.json").write_text(json.dumps(spec))
    (images / DESCRIPTORS).write_text("[]")
    keep_files(bundle, images)
    assert [path.name for path in images.iterdir()] == [FILE], "all that is needed has a name that manifests list"
    to = Moved(Path("/new/root"), Path("/new/agent"), work, Path("/run/netns/new"), "/new", Path("/new/criu.conf"))
    prepare_bundle(images, fresh, to)
    found = json.loads((fresh / "config.json").read_text())
    assert "/old" not in json.dumps(found)
    moved = {mount["destination"]: mount["source"] for mount in found["mounts"]}
    assert (moved["/run/agent"], moved["/proc"]) == ("/new/agent", "proc")
    assert Path(moved["/etc/hostname"]).read_bytes() == b"changed\n\xff"
    assert (fresh / "checkpoint" / DESCRIPTORS).read_text() == "[]"

    hostname.write_bytes(bytes(FILE_LIMIT + 1))
    with pytest.raises(CheckpointRefused, match="/etc/hostname"):
        keep_files(bundle, images)
