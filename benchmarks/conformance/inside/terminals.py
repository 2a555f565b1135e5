"""Terminals, and programs that live on one."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import termios
import time
from typing import Any

from .descriptors import waiting
from .kit import Resource, content, fork, require, resource, rest, wait_until


class Screen:
    """A program on a terminal of its own, and what it has written there."""

    def __init__(self, argv: list[str], **env: str) -> None:
        import pty

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", **env)
            os.execvp(argv[0], argv)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def read_until(self, wanted: str, timeout_s: float = 15.0) -> str:
        seen, end = b"", time.monotonic() + timeout_s
        while wanted.encode() not in seen:
            if not select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"{wanted!r} is not in {seen[-300:]!r}")
            seen += os.read(self.fd, 1 << 16)
        return seen.decode(errors="replace")

    def settle(self) -> None:
        """Read until it is silent, so that nothing is on its way."""
        while select.select([self.fd], [], [], 0.1)[0]:
            os.read(self.fd, 1 << 16)

    def state(self) -> Any:
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        modes = termios.tcgetattr(self.fd)
        return {
            "pid": self.pid,
            "session, terminal, foreground": fields[3:6],
            "modes": [*modes[:6], [str(c) for c in modes[6]]],
            "size": fcntl.ioctl(self.fd, termios.TIOCGWINSZ, bytes(8)).hex(),
            "name": os.readlink(f"/proc/{self.pid}/fd/0"),
        }


@resource("pty")
class Pty(Resource):
    """Modes, size, foreground group, and bytes in both directions that nobody has read."""

    def setup(self) -> None:
        self.master, self.slave = os.openpty()
        modes = termios.tcgetattr(self.slave)
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        modes[6][termios.VINTR] = b"\x07"
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))

    def probe(self) -> Any:
        modes = termios.tcgetattr(self.slave)
        size = fcntl.ioctl(self.slave, termios.TIOCGWINSZ, bytes(8)).hex()
        return [[*modes[:6], [str(c) for c in modes[6]]], size, os.ttyname(self.slave)]

    def use(self) -> None:
        os.write(self.master, b"typed")
        require(os.read(self.slave, 100) == b"typed", "typed")
        os.write(self.slave, b"shown")
        require(os.read(self.master, 100) == b"shown", "shown")


@resource("unread terminal output")
class PtyData(Resource):
    def setup(self) -> None:
        self.master, self.slave = os.openpty()
        modes = termios.tcgetattr(self.slave)
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        self._fill()

    def _fill(self) -> None:
        os.write(self.slave, b"nobody has read this")
        os.write(self.master, b"nor this")
        wait_until("it is there", lambda: waiting(self.master) == 20 and waiting(self.slave) == 8)

    def probe(self) -> Any:
        return [waiting(self.master), waiting(self.slave)]

    def use(self) -> None:
        require(os.read(self.master, 100) == b"nobody has read this", "output")
        require(os.read(self.slave, 100) == b"nor this", "input")
        self._fill()


@resource("python REPL")
class PythonRepl(Resource):
    def setup(self) -> None:
        self.screen = Screen(["python3", "-q", "-i"])
        self.screen.type("import os; secret = os.urandom(8).hex(); turn = 0\n")
        self.secret = self._ask("secret")
        self.screen.settle()

    def _ask(self, expression: str) -> str:
        self.screen.type(f"print('<' + str({expression}) + '>')\n")
        text = self.screen.read_until(">\r\n")
        return text[text.rindex("<") + 1 :].split(">")[0]

    def probe(self) -> Any:
        answer = [self._ask("secret") == self.secret, self._ask("turn")]
        self.screen.settle()
        return [*answer, self.screen.state()]

    def use(self) -> None:
        self.screen.type("turn += 1\n")
        self._ask("turn")
        self.screen.settle()


@resource("bash on a terminal")
class BashOnTerminal(Resource):
    """With a job in the background, a stopped one, and one in the foreground."""

    def setup(self) -> None:
        self.screen = Screen(["bash", "--norc", "--noprofile", "-i"], PS1="$ ", HISTFILE="")
        self.screen.type("secret=$RANDOM$RANDOM; sleep 9999 & sleep 8888\n")
        self.screen.read_until("8888")
        wait_until("the second runs", self._sleeps)
        self.screen.type("\x1a")
        self.screen.read_until("Stopped")
        self.screen.type("sleep 7777\n")
        wait_until("the third runs", self._sleeps)
        self.screen.settle()

    def _sleeps(self) -> bool:
        """Has the job in the foreground become what it is to be?"""
        job = self._foreground()
        return job not in (0, self.screen.pid) and content(f"/proc/{job}/comm") == "sleep\n"

    def _foreground(self) -> int:
        return struct.unpack("i", fcntl.ioctl(self.screen.fd, termios.TIOCGPGRP, bytes(4)))[0]

    def probe(self) -> Any:
        return self.screen.state()

    def use(self) -> None:
        job = self._foreground()
        require(job != self.screen.pid, "no job in the foreground")
        self.screen.type("\x03")
        wait_until("Ctrl-C ends it", lambda: self._foreground() == self.screen.pid)
        self.screen.type("echo [$secret]; jobs; echo done''done\n")
        text = self.screen.read_until("donedone")
        require("Running" in text and "Stopped" in text, text)
        self.screen.type("sleep 7777\n")
        wait_until("the third runs", self._sleeps)
        self.screen.settle()


@resource("tmux")
class Tmux(Resource):
    """A server with a session that nobody looks at, and a client that does."""

    needs = ("tmux",)

    def setup(self) -> None:
        os.environ["TMUX_TMPDIR"] = os.getcwd()
        os.environ.update(LC_ALL="C.UTF-8", TERM="xterm")
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "90", "-y", "25", "-s", "one", "bash --norc")
        self._tmux("new-window", "-t", "one", "python3 -q -i")
        self.screen = Screen(["tmux", "attach", "-t", "one"])
        self._tmux("send-keys", "-t", "one:0", "secret=kept; cd /tmp", "Enter")
        self._tmux("send-keys", "-t", "one:1", "secret = 'also kept'", "Enter")
        time.sleep(0.3)
        self.screen.settle()

    def _tmux(self, *arguments: str) -> str:
        import subprocess

        done = subprocess.run(["tmux", *arguments], capture_output=True, text=True, timeout=15, check=False)
        require(done.returncode == 0, f"tmux {arguments[0]}: {done.stderr}")
        return done.stdout

    def probe(self) -> Any:
        seen = self._tmux("list-panes", "-a", "-F", "#{pane_id} #{pane_pid} #{pane_width} #{session_attached}")
        self.screen.settle()
        return seen

    def use(self) -> None:
        self._tmux("send-keys", "-t", "one:0", "echo $secret-in-$PWD", "Enter")
        self._tmux("send-keys", "-t", "one:1", "print(secret, 40 + 2)", "Enter")
        wait_until("bash answers", lambda: "kept-in-/tmp" in self._tmux("capture-pane", "-p", "-t", "one:0"))
        wait_until("python answers", lambda: "also kept 42" in self._tmux("capture-pane", "-p", "-t", "one:1"))
        for window in ("0", "1"):
            self._tmux("send-keys", "-t", f"one:{window}", "C-l")
        self.screen.settle()


@resource("vim")
class Vim(Resource):
    """An editor with a changed buffer that was not saved."""

    needs = ("vim.tiny",)

    def setup(self) -> None:
        with open("text", "w") as file:
            file.write("first line\n")
        self.screen = Screen(["vim.tiny", "-u", "NONE", "text"])
        self.screen.read_until("first line")
        self.turn = 0
        self.screen.type("ounsaved")
        self.screen.settle()

    def probe(self) -> Any:
        return [content("text"), self.screen.state()]

    def use(self) -> None:
        self.turn += 1
        self.screen.type(f" {self.turn}\x1b:w! saved-{self.turn}\r")
        name = f"saved-{self.turn}"
        wait_until("it is saved", lambda: os.path.exists(name) and os.path.getsize(name) > 20)
        wanted = "first line\nunsaved" + "".join(f" {n}" for n in range(1, self.turn + 1)) + "\n"
        require(content(name) == wanted, content(name))
        self.screen.type("A")
        self.screen.settle()


@resource("terminal of a dead program")
class Orphaned(Resource):
    """The program has hung up, its output is still to be read to the end."""

    def setup(self) -> None:
        self.master, slave = os.openpty()
        self.child = fork(rest)
        os.close(slave)

    def probe(self) -> Any:
        return fcntl.ioctl(self.master, termios.TIOCGWINSZ, bytes(8)).hex()

    def use(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        try:
            require(os.read(self.master, 10) == b"", "something came")
        except OSError:
            pass  # EIO: hung up, as it should be
        os.close(self.master)
        self.setup()
