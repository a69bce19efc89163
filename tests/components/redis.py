"""Redis."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from components.processes import Process, free_port, program

IN_MEMORY: Final = ("--save", "", "--appendonly", "no")
"""A Redis that is empty when it is started again."""


class RedisServer:
    """A Redis at `url`, whose process can fail: its port and its folder stay."""

    def __init__(self, folder: Path, options: tuple[str, ...]) -> None:
        self.folder = folder
        self._options = options
        self._program = program("redis-server")
        self._process: Process | None = None
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        """Start it, and return when it answers. `options` hold beside those that it was made with, until it
        ends."""
        if self._process is not None:
            raise RuntimeError("it runs")
        own = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder))
        command = (self._program, *own, *self._options, *options)
        self._process = Process(command, self.folder / "redis.out")
        self._process.wait_until(self._responds)

    def stop(self) -> None:
        """Let it end as it does by itself: what it is to keep is written."""
        if self._process is not None:
            self._process.signal(signal.SIGCONT)
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def pause(self) -> None:
        """Let it stand still: connections stay and get no answer."""
        assert self._process is not None
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.signal(signal.SIGCONT)

    def _responds(self) -> bool:
        """Whether it takes commands; the answer to a first one without a password, where it wants one, is an
        error."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A Redis with its files in `folder`, in memory unless `options` (of its command line) say otherwise."""
    server = RedisServer(folder, (*IN_MEMORY, *options))
    try:
        server.start()
        yield server
    finally:
        server.kill()
