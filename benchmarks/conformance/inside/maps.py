"""Files that are open, mapped, deleted, or all of it; databases in the middle of a transaction."""

from __future__ import annotations

import mmap
import os
import signal
from typing import Any

from .kit import Resource, call, content, digest, fork, in_child, require, resource


def file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return digest(file.read())


@resource("deleted open file")
class DeletedFile(Resource):
    """Deleted and replaced by another of its name; one in another folder that is gone too; one with a second name."""

    def setup(self) -> None:
        self.files = []
        os.mkdir("folder")
        for name in ("plain", "folder/inner", "linked"):
            file = open(name, "w+b", buffering=0)  # noqa: SIM115 - it stays open
            file.write(os.urandom(300_000))
            file.seek(1000)
            self.files.append(file)
        os.link("linked", "second name")
        os.unlink("linked")
        os.unlink("plain")
        os.unlink("folder/inner")
        os.rmdir("folder")
        with open("plain", "w") as other:
            other.write("another file of the same name")
        self.unnamed = os.open(".", os.O_TMPFILE | os.O_RDWR)
        os.write(self.unnamed, b"never had a name")

    def probe(self) -> Any:
        seen = []
        for file in self.files:
            fd = file.fileno()
            seen.append([file.tell(), os.fstat(fd).st_nlink, digest(os.pread(fd, 400_000, 0)), os.fstat(fd).st_mode])
        return [seen, os.pread(self.unnamed, 100, 0).decode(), content("plain"), os.path.exists("folder")]

    def use(self) -> None:
        for file in self.files:
            file.write(b"more")
        same = os.stat("second name")
        require(same.st_ino == os.fstat(self.files[2].fileno()).st_ino, "the second name is another file now")
        require(os.path.getsize("second name") == 300_000, "the write does not show")


@resource("deleted folder")
class DeletedFolder(Resource):
    """Open, and the working directory of a process."""

    def setup(self) -> None:
        os.mkdir("gone")
        self.fd = os.open("gone", os.O_RDONLY | os.O_DIRECTORY)
        self.child = fork(self._live)
        while os.readlink(f"/proc/{self.child}/cwd").rpartition("/")[2] != "gone":
            pass
        os.rmdir("gone")

    def _live(self) -> None:
        os.chdir("gone")
        while True:
            signal.pause()

    def probe(self) -> Any:
        return [os.readlink(f"/proc/{self.child}/cwd").split()[-1], os.listdir(self.fd), os.fstat(self.fd).st_nlink]


@resource("open files")
class OpenFiles(Resource):
    """Renamed while open, opened to append, write-only, sparse, and a descriptor of a folder."""

    def setup(self) -> None:
        self.renamed = open("before", "w+")  # noqa: SIM115 - it stays open
        self.renamed.write("content")
        self.renamed.flush()
        os.rename("before", "after")
        self.append = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.sparse = os.open("sparse", os.O_RDWR | os.O_CREAT)
        os.pwrite(self.sparse, b"end", 10 << 20)
        os.lseek(self.sparse, 5 << 20, os.SEEK_SET)
        self.folder = os.open(".", os.O_RDONLY)
        os.mkdir("many")
        for number in range(20):
            open(f"many/{number}", "w").close()
        self.many = os.open("many", os.O_RDONLY)

    def probe(self) -> Any:
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in (self.renamed.fileno(), self.append, self.folder)]
        at = [self.renamed.tell(), os.lseek(self.sparse, 0, os.SEEK_CUR), os.path.getsize("log")]
        os.lseek(self.folder, 0, os.SEEK_SET)  # what came later is seen by who starts anew
        return [names, at, os.fstat(self.sparse).st_blocks, sorted(os.listdir(self.folder)), len(os.listdir(self.many))]

    def use(self) -> None:
        before = os.path.getsize("log")
        os.write(self.append, b"line\n")
        require(os.path.getsize("log") == before + 5, "not appended")
        self.renamed.seek(0)
        require(content("after").startswith("content") and self.renamed.read(7) == "content", "renamed")


@resource("mapped file")
class MappedFile(Resource):
    """Shared between two processes and private with changes; one of them deleted."""

    def setup(self) -> None:
        self.maps = {}
        for name, flags in (("shared", mmap.MAP_SHARED), ("deleted", mmap.MAP_SHARED), ("private", mmap.MAP_PRIVATE)):
            with open(name, "w+b") as file:
                file.write(os.urandom(1 << 18))
                file.flush()
                self.maps[name] = mmap.mmap(file.fileno(), 1 << 18, flags=flags)
            self.maps[name][5000:5007] = b"changed"
        os.unlink("deleted")
        self.anonymous = mmap.mmap(-1, 1 << 18)
        self.anonymous[:] = os.urandom(1 << 18)
        self.request, self.answer = os.pipe(), os.pipe()
        self.child = fork(self._twin)

    def _twin(self) -> None:
        while True:
            at = int(os.read(self.request[0], 20))
            for area in (*self.maps.values(), self.anonymous):
                area[at] = (area[at] + 1) % 256
            os.write(self.answer[1], b"done")

    def probe(self) -> Any:
        content = {name: digest(area) for name, area in self.maps.items()} | {"anonymous": digest(self.anonymous)}
        return [content, file_digest("shared"), file_digest("private")]

    def use(self) -> None:
        before = {name: area[9999] for name, area in self.maps.items()}, self.anonymous[9999]
        os.write(self.request[1], b"9999")
        os.read(self.answer[0], 4)
        after = {name: area[9999] for name, area in self.maps.items()}, self.anonymous[9999]
        moved = {name: (after[0][name] - before[0][name]) % 256 for name in self.maps}
        require(moved == {"shared": 1, "deleted": 1, "private": 0}, f"sharing: {moved}")
        require((after[1] - before[1]) % 256 == 1, "anonymous memory is not shared any more")


@resource("memfd")
class Memfd(Resource):
    def setup(self) -> None:
        self.fd = os.memfd_create("named", os.MFD_ALLOW_SEALING)
        os.write(self.fd, os.urandom(1 << 17))
        self.area = mmap.mmap(self.fd, 1 << 17)
        call("fcntl", self.fd, 1033, 0x2 | 0x4)  # sealed against shrinking and growing

    def probe(self) -> Any:
        return [digest(self.area), call("fcntl", self.fd, 1034, 0), os.readlink(f"/proc/self/fd/{self.fd}")]

    def use(self) -> None:
        self.area[77] ^= 1
        require(os.pread(self.fd, 1, 77)[0] == self.area[77], "the map and the file are two things now")


@resource("sqlite transaction")
class Sqlite(Resource):
    """In the middle of a write transaction that has begun to change the file. WAL mode is refused: test_refused.py."""

    def setup(self) -> None:
        import sqlite3

        self.sqlite3 = sqlite3
        self.writer = self._open()
        self.writer.execute("pragma cache_size=5")  # so that the transaction spills into the file
        self.writer.execute("create table t (n integer)")
        self.writer.execute("begin")  # not a thousand transactions, each with its fsync
        self.writer.executemany("insert into t values (?)", [(n,) for n in range(1000)])
        self.writer.execute("commit")
        self._begin()

    def _open(self) -> Any:
        return self.sqlite3.connect("base.sqlite", isolation_level=None, timeout=0.1)

    def _begin(self) -> None:
        self.writer.execute("begin exclusive")
        self.writer.executemany("insert into t values (?)", [(n,) for n in range(5000)])

    def _sum(self, connection: Any) -> list[int]:
        return list(connection.execute("select count(*), sum(n) from t").fetchone())

    def _outsider(self) -> str:
        try:
            other = self._open()
            count = self._sum(other)
            other.execute("begin immediate")
            return f"{count}, and it may write"
        except self.sqlite3.OperationalError as error:
            return str(error)

    def probe(self) -> Any:
        journal = os.path.exists("base.sqlite-journal")
        return [self._sum(self.writer), journal, self.writer.in_transaction, in_child(self._outsider)]

    def use(self) -> None:
        inside = self._sum(self.writer)
        self.writer.execute("commit")
        require(in_child(lambda: str(self._sum(self._open()))) == str(inside), "the commit is not seen")
        require(self.writer.execute("pragma integrity_check").fetchone()[0] == "ok", "damaged")
        self._begin()
