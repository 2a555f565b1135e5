"""What is in the file system alone. No process holds these: every look is a fresh one."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
from typing import Any

from .kit import Resource, content, digest, require, resource


class Files(Resource):
    level = "fs"

    def damage(self) -> None:
        for name in os.listdir():
            shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
        open("left behind", "w").close()


@resource("sparse file")
class Sparse(Files):
    def setup(self) -> None:
        with open("sparse", "wb") as file:
            for at in (0, 5 << 20, 100 << 20):
                file.seek(at)
                file.write(b"data" * 2048)
            file.truncate(200 << 20)

    def probe(self) -> Any:
        fd = os.open("sparse", os.O_RDONLY)
        parts, at = [], 0
        try:
            while True:
                start = os.lseek(fd, at, os.SEEK_DATA)
                at = os.lseek(fd, start, os.SEEK_HOLE)
                parts.append([start, at, digest(os.pread(fd, at - start, start))])
        except OSError:
            pass
        status = os.fstat(fd)
        os.close(fd)
        return [parts, status.st_size, status.st_blocks]


@resource("hard links")
class HardLinks(Files):
    def setup(self) -> None:
        os.makedirs("deep/er")
        with open("one", "w") as file:
            file.write("content")
        os.link("one", "two")
        os.link("one", "deep/er/three")
        os.symlink("one", "symbolic")
        os.symlink("/nowhere/at all", "dangling")

    def probe(self) -> Any:
        same = {os.stat(name).st_ino for name in ("one", "two", "deep/er/three")}
        links = [os.readlink(name) for name in ("symbolic", "dangling")]
        return [len(same), os.stat("one").st_nlink, links, open("two").read()]

    def use(self) -> None:
        with open("two", "a") as file:
            file.write("+")
        require(content("deep/er/three") == content("one"), "two files now")


@resource("extended attributes")
class Xattrs(Files):
    def setup(self) -> None:
        os.mkdir("folder")
        for name in ("file", "folder"):
            if name == "file":
                open(name, "w").close()
            os.setxattr(name, "user.conformance", b"\0binary\xff" * 20)
        os.mkdir("owned")
        os.chown("owned", 65534, 7)
        os.utime("file", ns=(1_000_000_000_123_456_789, 1_234_567_890_987_654_321))

    def probe(self) -> Any:
        found = {n: {a: os.getxattr(n, a).hex() for a in os.listxattr(n)} for n in ("file", "folder")}
        owner = os.stat("owned")
        return [found, owner.st_uid, owner.st_gid, os.stat("file").st_mtime_ns]


@resource("setuid files")
class Setuid(Files):
    """Modes with setuid, setgid and sticky bits, owners, and a program with a file capability."""

    def setup(self) -> None:
        for name, mode in (("setuid", 0o4755), ("setgid", 0o2755), ("none", 0o000)):
            shutil.copy("/bin/true", name)
            os.chown(name, 65534, 65534)
            os.chmod(name, mode)
        os.mkdir("sticky")
        os.chmod("sticky", 0o1777)
        shutil.copy("/bin/true", "capable")
        os.setxattr("capable", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))

    def probe(self) -> Any:
        found = []
        for name in ("setuid", "setgid", "none", "sticky", "capable"):
            status = os.lstat(name)
            found.append([name, oct(status.st_mode), status.st_uid, status.st_gid])
        return [found, os.getxattr("capable", "security.capability").hex()]


@resource("special files")
class Special(Files):
    """Sockets and fifos that nobody holds, odd names, an empty folder, a deep one, a long name."""

    def setup(self) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("socket")
        os.mkfifo("fifo")
        os.mkdir("empty")
        os.makedirs("/".join(["deep"] * 60))
        for name in (b"new\nline", b"\xff\xfe not utf-8", b"-rf", b" ", b"l" * 255):
            with open(name, "wb") as file:
                file.write(name)

    def probe(self) -> Any:
        names = sorted(os.listdir(b"."))
        depth = sum(1 for _ in os.walk("deep"))
        kinds = [stat.S_IFMT(os.lstat(name).st_mode) for name in names]
        return [[name.hex() for name in names], kinds, depth]


@resource("20,000 files")
class ManyFiles(Files):
    group = "big"

    def setup(self) -> None:
        for folder in range(100):
            os.makedirs(f"{folder}")
            for number in range(200):
                fd = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT, 0o644)
                os.write(fd, b"%d " % (folder * 200 + number) * 50)
                os.close(fd)

    def probe(self) -> Any:
        total, count = hashlib.sha256(), 0
        for folder, folders, names in os.walk("."):
            folders.sort()
            for name in sorted(names):
                fd = os.open(f"{folder}/{name}", os.O_RDONLY)
                total.update(os.read(fd, 1 << 16))
                os.close(fd)
                count += 1
        return [count, total.hexdigest()[:16]]

    def use(self) -> None:
        turn = len(os.listdir("0")) - 200
        for folder in range(20):
            with open(f"{folder}/new-{turn}", "w") as file:
                file.write(f"{turn}")
            with open(f"{folder}/7", "a") as file:
                file.write(f"{turn}")

    def damage(self) -> None:
        for folder in range(40):
            shutil.rmtree(f"{folder}", ignore_errors=True)


@resource("large file")
class LargeFile(Files):
    """Rewritten in the middle after it was made, which shares its blocks with older checkpoints."""

    def setup(self) -> None:
        block = os.urandom(1 << 20)
        with open("large", "wb") as file:
            for _ in range(16):
                file.write(block)

    def probe(self) -> Any:
        with open("large", "rb") as file:
            return [os.path.getsize("large"), hashlib.file_digest(file, "sha256").hexdigest()[:16]]

    def use(self) -> None:
        with open("large", "r+b") as file:
            file.seek(7 << 20)
            file.write(os.urandom(4096))
