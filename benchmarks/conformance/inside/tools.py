"""What agents run all day, caught in the middle of it: git, pip, tar."""

from __future__ import annotations

import glob
import os
import signal
from typing import Any

from .kit import Resource, content, require, resource, wait_until

GIT = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}
SETUP = """
import os, time
from distutils.core import setup
open("{here}/building", "a").write("x")
while not os.path.exists("{here}/go-on"):
    time.sleep(0.02)
setup(name="slow", version="1.{turn}", py_modules=["slow_{turn}"])
"""


def git(*arguments: str) -> str:
    import subprocess

    done = subprocess.run(["git", *arguments], capture_output=True, text=True, env={**os.environ, **GIT}, check=False)
    require(done.returncode == 0, f"git {arguments}: {done.stderr}")
    return done.stdout


@resource("git operation in progress")
class GitCommit(Resource):
    """`git commit` stands in its hook, with the index locked; a merge with a conflict stands in another clone."""

    needs = ("git",)

    def setup(self) -> None:
        git("init", "-q", "-b", "main", "repo")
        os.chdir("repo")
        with open(".git/hooks/pre-commit", "w") as hook:
            hook.write("#!/bin/sh\necho x >> ../in-hook\nwhile ! test -e ../go-on; do sleep 0.02; done\nrm ../go-on\n")
        os.chmod(".git/hooks/pre-commit", 0o755)
        self.turn = 0
        self._commit()

    def _hooks(self) -> int:
        return os.path.getsize("../in-hook") if os.path.exists("../in-hook") else 0

    def _commit(self) -> None:
        import subprocess

        self.turn += 1
        for number in range(20):
            with open(f"file-{number}", "w") as file:
                file.write(f"{number} in turn {self.turn}\n")
        git("add", ".")
        before = self._hooks()
        self.running = subprocess.Popen(
            ["git", "commit", "-q", "-a", "-m", f"turn {self.turn}"],
            env={**os.environ, **GIT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        wait_until("the hook runs", lambda: self._hooks() > before)

    def probe(self) -> Any:
        return [self.running.poll(), sorted(glob.glob(".git/*.lock")), self._hooks(), git("count-objects")]

    def use(self) -> None:
        open("../go-on", "w").close()
        output = self.running.communicate(timeout=20)[0]
        require(self.running.returncode == 0, f"git commit: {output!r}")
        require(git("log", "-1", "--format=%s") == f"turn {self.turn}\n", "the commit is not there")
        git("fsck", "--strict")
        require(git("status", "--short") == "", git("status", "--short"))
        self._commit()


@resource("pip install in progress")
class PipInstall(Resource):
    """pip builds a package from its sources; no network."""

    needs = ("pip3",)

    def setup(self) -> None:
        self.here, self.turn = os.getcwd(), 0
        self._install()

    def _install(self) -> None:
        import subprocess

        self.turn += 1
        os.makedirs("source", exist_ok=True)
        with open("source/setup.py", "w") as file:
            file.write(SETUP.format(here=self.here, turn=self.turn))
        with open(f"source/slow_{self.turn}.py", "w") as file:
            file.write(f"turn = {self.turn}\n")
        before = os.path.getsize("building") if os.path.exists("building") else 0
        command = ["pip3", "install", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
        command += ["--break-system-packages", "--target", f"installed-{self.turn}", "./source"]
        self.running = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"},
        )
        wait_until("it builds", self._builds(before), 30)

    def _builds(self, before: int) -> Any:
        def check() -> bool:
            if self.running.poll() is not None:
                raise AssertionError(f"pip ended: {self.running.communicate()[0][-500:]!r}")
            return os.path.exists("building") and os.path.getsize("building") > before

        return check

    def probe(self) -> Any:
        return [self.running.returncode, os.path.getsize("building"), sorted(glob.glob("installed-*"))]

    def use(self) -> None:
        import subprocess

        if self.running.returncode is not None:
            return  # two builds are enough: each takes seconds
        open("go-on", "w").close()
        output = self.running.communicate(timeout=60)[0]
        require(self.running.returncode == 0, f"pip: {output[-500:]!r}")
        seen = subprocess.run(
            ["python3", "-c", f"import slow_{self.turn} as s; print(s.turn)"],
            env={**os.environ, "PYTHONPATH": f"installed-{self.turn}"},
            capture_output=True,
            text=True,
            check=False,
        )
        require(seen.stdout == f"{self.turn}\n", f"{seen}")
        os.unlink("go-on")
        if self.turn == 1:
            self._install()


@resource("pipeline in progress")
class Pipeline(Resource):
    """A shell's pipeline that has done a part of its work, and must do exactly the rest."""

    def setup(self) -> None:
        import subprocess

        with open("input", "wb") as file:
            file.write(os.urandom(1 << 20))
        self.wanted = subprocess.run(["sha256sum", "input"], capture_output=True, check=True).stdout.split()[0].decode()
        self._start()

    def _start(self) -> None:
        import subprocess

        slowly = "while read -r line; do echo $line; done"
        code = (
            "import sys,time\nd=open('input','rb').read()\n"
            "for i in range(0,len(d),4096):\n sys.stdout.buffer.write(d[i:i+4096]); sys.stdout.flush()\n"
            " time.sleep(0 if i<600000 else 0.001)\n if i==600064-64: open('half','w').close()\n"
            " while i==602112 and not __import__('os').path.exists('rest'): time.sleep(0.02)\n"
        )
        self.running = subprocess.Popen(
            ["bash", "-c", f'python3 -c "$CODE" | gzip -1 | gzip -d | sha256sum | ({slowly}) > sum'],
            env={**os.environ, "CODE": code},
            start_new_session=True,
        )
        wait_until("half is done", lambda: os.path.exists("sum"))

    def probe(self) -> Any:
        return [self.running.poll(), os.path.getsize("sum")]

    def use(self) -> None:
        open("rest", "w").close()
        self.running.wait(30)
        require(content("sum").split()[0] == self.wanted, content("sum"))
        for name in ("rest", "sum", "half"):
            if os.path.exists(name):
                os.unlink(name)
        self._start()

    def damage(self) -> None:
        os.killpg(self.running.pid, signal.SIGKILL)
