"""Processes of other people's servers: started, asked until they answer, and ended by their id."""

import ctypes
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

START_LIMIT_S: Final = 600.0
STOP_LIMIT_S: Final = 5.0
_POLL_INTERVAL_S = 0.01
_PORTS = range(20_000, 32_000)
"""Below those that the system gives to outgoing connections, so none of these takes one between its choice
and its use, nor while its server is down."""
_PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """A component that is not installed here. `component` is its name."""

    def __init__(self, component: str) -> None:
        super().__init__(f"{component} is not installed")
        self.component = component


def program(name: str, component: str | None = None) -> str:
    """The path of an executable. Raises Missing, for the component that it is part of."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        raise Missing(component or name)
    return found


def in_target(component: str) -> Path:
    """The folder of `target/` with a component from PyPI or npm. Raises Missing."""
    folder = Path(__file__).parents[2] / "target" / component
    if not any(folder.glob("installed-*")):
        raise Missing(component)
    return folder


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]  # hypothesis seeds `random`, in each process alike
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Process:
    """A running process, its output in the file `output`. It does not outlive the thread that started it."""

    def __init__(self, command: Sequence[str], output: Path, cwd: Path | None = None) -> None:
        self._output = output
        with output.open("ab") as stream:
            self._popen = subprocess.Popen(
                command,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Ask `ready` until it says so; an OSError is a no. Raises RuntimeError with the end of its output
        where the process ends first, or takes longer than START_LIMIT_S."""
        deadline = time.monotonic() + START_LIMIT_S
        while self._popen.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                if ready():
                    return
            time.sleep(_POLL_INTERVAL_S)
        said = self._output.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self._popen.args!r} does not start (exit status {self._popen.poll()}): {said}")

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def stop(self) -> None:
        """Ask it to end, and end it where it has not after STOP_LIMIT_S. Nothing where it has ended."""
        self._popen.terminate()
        try:
            self._popen.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once. Nothing where it has ended."""
        self._popen.kill()
        self._popen.wait()


@contextmanager
def running(command: Sequence[str], output: Path, cwd: Path | None = None) -> Iterator[Process]:
    """A process that is killed at the end."""
    process = Process(command, output, cwd)
    try:
        yield process
    finally:
        process.kill()


def accepts(port: int) -> bool:
    """Whether somebody listens on the port."""
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


def serves_http(port: int) -> bool:
    """Whether a server on the port answers HTTP, whatever it says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status > 0
    finally:
        connection.close()


_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
