"""Runs the commands and files of a Markdown page in a temporary folder, as its reader would.

A fenced block of the page means

- with `title="NAME"`: a file of that name, which is written;
- `sh`: commands. Those of a page share a shell, so variables stay. A last command that does not end (`pysync
  serve`, `pysync watch`, `pysync tail -f`, `curl -sN`, `python login.py`) runs in the background;
- `text`: the output of the block before it. `…` stands for any text in a line, a line of `…` for any lines.
  With `title="COMMAND"` it is the output of the background command that begins like this.

Other blocks are checked as far as they can be: JSON is parsed, a configuration validated, Python compiled.

An HTML comment in the line before a block changes that:

- `<!-- not run: REASON -->`: it is only checked as far as that is possible without running it;
- `<!-- exit status: N -->`: its last command ends with this status;
- `<!-- stop: COMMAND -->`: the background command is interrupted first, as by Ctrl-C.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.request import urlopen

import yaml
from components import free_port
from components.processes import serves_http

from pysync import config

WAIT_S: Final = 20.0
_BACKGROUND: Final = re.compile(
    r"(\w+=\S+ )*pysync (serve|watch|tail -f)\b|curl -sN |python (watch|receive|login)\.py"
)
_BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<directive>[^\n]*?) -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"\n]*)\")?\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_PORT: Final = re.compile(
    r"(?<=127\.0\.0\.1:)\d{4}\b|(?<=--port )\d{4}\b|(?<=localhost:)\d{4}\b|(?<=\"port\": )\d{4}\b"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `line` is that of its fence, from 1."""

    language: str
    title: str
    text: str
    line: int
    directive: str

    def value(self, name: str) -> str:
        """What the directive `name` says, "" where there is none."""
        found = re.fullmatch(rf"{name}: (.*)", self.directive)
        return found[1] if found else ""


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in order. Raises ValueError for a fence that is not one of them."""
    found = [
        Block(
            match["language"],
            match["title"] or "",
            match["text"],
            page[: match.start("language")].count("\n") + 1,
            match["directive"] or "",
        )
        for match in _BLOCK.finditer(page)
    ]
    if 2 * len(found) != len(re.findall(r"^ *```", page, re.M)):
        raise ValueError("a fence without a language, within a list, or with other words beside its title")
    return found


@dataclass
class _Background:
    command: str
    pid: int
    output: Path


class PageRunner:
    """A shell in `folder`, with the environment of a user whose server is to listen on a free port."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._ports: dict[str, str] = {}
        self._runs = 0
        self._background: list[_Background] = []
        self._output = ""
        self.url = f"http://127.0.0.1:{self.port('8080')}"
        home = folder.parent / f"{folder.name}-home"
        home.mkdir()
        folder.mkdir(exist_ok=True)
        self._log = home
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-s"],
            cwd=folder,
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
                "HOME": str(home),
                "LANG": "C.UTF-8",
                "PYTHONUNBUFFERED": "1",
                "PYSYNC_URL": self.url,
                "PYSYNC_SERVER_PORT": self.port("8080"),
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Each background command is a job of its own, so that it can be interrupted, and ends with the shell.
        self._shell_line("set -m; trap 'jobs -p | xargs -r kill 2>/dev/null' EXIT")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self._background:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGTERM)
        self._shell.communicate(b"wait\n")

    def port(self, shown: str) -> str:
        """The free port that stands for the one that pages show."""
        if shown not in self._ports:
            self._ports[shown] = str(free_port())
        return self._ports[shown]

    def here(self, text: str) -> str:
        """`text` with the ports of this run."""
        return _PORT.sub(lambda match: self.port(match[0]), text)

    def page(self, page: str) -> None:
        """Do all that a page shows. Raises AssertionError with the line of what went otherwise."""
        blocks = blocks_of(page)
        for block in blocks:
            try:
                self.block(block)
            except AssertionError as failed:
                raise AssertionError(f"line {block.line}: {failed}") from None

    def block(self, block: Block) -> None:
        """Do what one block shows."""
        if name := block.value("stop"):
            self.stop(name)
        if block.value("not run"):
            check_only(block)
        elif block.language == "text":
            self._compare(block)
        elif block.title:
            if block.language in ("json", "python", "yaml"):
                check_only(block)
            path = self.folder / block.title
            assert path.resolve().is_relative_to(self.folder.resolve()), (
                f"{block.title} is no file of the page"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.here(block.text))
        elif block.language == "sh":
            self.run(block.text, int(block.value("exit status") or 0))
        else:
            check_only(block)

    def run(self, commands: str, status: int = 0) -> str:
        """Run commands in the shell, and return what they print, standard output and errors together."""
        self._runs += 1
        output = self._log / f"{self._runs}.out"
        *before, last = self.here(commands).strip().replace("\\\n", " ").split("\n")
        if _BACKGROUND.match(last):
            if before:
                self.run("\n".join(before))
            return self._start(last, output)
        strict = "+e" if status else "-e"
        ended, _ = self._shell_line(
            f"{{ set {strict} -o pipefail\n{self.here(commands)}\n}} >{output} 2>&1 </dev/null"
        )
        self._output = output.read_text()
        assert ended == status, f"exit status {ended}, and this output:\n{self._output}{self._logs()}"
        return self._output

    def _shell_line(self, command: str) -> tuple[int, int]:
        """Have the shell run `command`; its exit status and the id of the latest background process."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{command}\necho $? ${{!:-0}}\nset +e\n".encode())
        self._shell.stdin.flush()
        line = self._shell.stdout.readline().split()
        if not line:  # `set -e` has ended the shell
            return self._shell.wait(), 0
        return int(line[0]), int(line[1])

    def _start(self, command: str, output: Path) -> str:
        streams = self._streams()
        errors = "" if "2>" in command else f"2>{output.with_suffix('.err')}"
        _, pid = self._shell_line(f"{command} >{output} {errors} </dev/null &")
        started = _Background(command, pid, output)
        self._background.append(started)
        if "pysync serve" in command:
            port = re.search(r"--port (\d+)", command)
            self._until(lambda: serves_http(int(port[1] if port else self.port("8080"))), started)
        elif "receive.py" in command or "login.py" in command:
            self._until(lambda: bool(output.read_text()), started)
        else:
            self._until(lambda: self._streams() > streams, started)
        self._output = output.read_text()
        return self._output

    def _streams(self) -> float:
        """How many change streams the servers of this page have open."""
        try:
            with urlopen(f"{self.url}/metrics", timeout=5) as answer:
                found = re.search(rb"^pysync_streams (\S+)", answer.read(), re.M)
        except OSError:
            return 0
        return float(found[1]) if found else 0

    def _until(self, ready: Callable[[], bool], started: _Background) -> None:
        deadline = time.monotonic() + WAIT_S
        while not _succeeds(ready):
            assert Path(f"/proc/{started.pid}").exists(), f"{started.command} has ended:\n{self._logs()}"
            assert time.monotonic() < deadline, f"{started.command} is not ready:\n{self._logs()}"
            time.sleep(0.02)

    def _compare(self, block: Block) -> None:
        expected = _pattern(self.here(block.text))
        if not block.title:
            assert expected.fullmatch(self._output.strip()), f"shown:\n{block.text}\nprinted:\n{self._output}"
            return
        output = self._find(block.title).output
        deadline = time.monotonic() + WAIT_S
        while not expected.fullmatch(printed := output.read_text().strip()):
            assert time.monotonic() < deadline, f"shown:\n{block.text}\nprinted:\n{printed}{self._logs()}"
            time.sleep(0.02)

    def _find(self, command: str) -> _Background:
        """The latest background command that begins like this."""
        found = [each for each in self._background if each.command.startswith(command)]
        assert found, f"nothing of the page runs {command!r}"
        return found[-1]

    def stop(self, command: str) -> None:
        """Interrupt the latest background command that begins like this, and wait for its end."""
        background = self._find(command)
        self._background.remove(background)
        self._shell_line(f"kill -INT {background.pid}; wait {background.pid}")

    def _logs(self) -> str:
        logs = [f"{path.name}:\n{path.read_text()}" for path in sorted(self._log.glob("*.err"))]
        return "\n".join(log[-3000:] for log in logs)


def _succeeds(ready: Callable[[], bool]) -> bool:
    with suppress(OSError):
        return ready()
    return False


def _pattern(shown: str) -> re.Pattern[str]:
    """What matches the output that a page shows."""
    lines = [
        r"(?:.*\n)*?.*"
        if line.strip() == "…"
        else "[^\n]*".join(re.escape(part) for part in line.rstrip().split("…"))
        for line in shown.strip().split("\n")
    ]
    return re.compile("[ \t]*\n".join(lines))


def check_only(block: Block) -> None:
    """Check a block as far as that is possible without running it."""
    if block.language == "sh":
        checked = subprocess.run(
            ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
        )
        assert not checked.stderr, checked.stderr
    elif block.language == "python":
        compile(block.text, f"line {block.line}", "exec")
    elif block.language == "json":
        members = json.loads(block.text)
        if "collections" in members and "${" not in block.text:
            config.parse(members)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    else:
        assert block.language in ("mermaid", "text") or block.value("not run"), f"{block.language} is not run"
