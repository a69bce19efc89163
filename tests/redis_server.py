"""A redis-server of a test: stopped in every way there is, and started again on the same port."""

import asyncio
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotThere

NO_MEMORY = ("--save", "", "--appendonly", "no")
WITH_AOF = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class RedisServer:
    """One server in `folder`. Without more options it remembers nothing once it ends."""

    folder: Path
    port: int = field(default_factory=free_port)
    password: str = ""
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        user = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0"

    def client(self) -> Redis:
        """A client beside the coordinator's, to look and to meddle. The caller closes it."""
        return Redis.from_url(self.url, retry=Retry(NoBackoff(), 0))

    async def start(self, *options: str) -> None:
        """Start it and wait until it answers."""
        self.process = await asyncio.create_subprocess_exec(
            "redis-server", "--bind", "127.0.0.1", "--port", f"{self.port}", "--dir", os.fspath(self.folder),
            *NO_MEMORY, *(("--requirepass", self.password) if self.password else ()), *options,
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with self.client() as client:
            while True:
                try:
                    await client.ping()
                    return
                except NotThere:
                    assert self.process.returncode is None, "redis-server ended"

    async def kill(self) -> None:
        """End it as the loss of its machine would."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    def hang(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            await self.kill()
