"""A `pysync serve` whose configuration file changes while it runs."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from pysync.cli.main import main
from support.clients import Browser, Reply
from support.collections import collection
from support.server_process import serving
from support.sse_client import listen
from support.worker_processes import Service, until

ADMIN = "0123456789abcdef"
NOTES = collection("notes")


class ReloadedService(Service):
    """A service, and its file. `operators` is the URL of its operators' listener."""

    operators: str

    @property
    def file(self) -> Path:
        return self.log.with_suffix(".json")

    def rewrite(self, **members: Any) -> None:
        """Put other members into the file, as an editor does: the old file or the new one is there."""
        changed = json.loads(self.file.read_text())
        changed["server"] |= members.pop("server", {})
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(changed | members))
        new.replace(self.file)

    def outcomes(self) -> list[str]:
        """The lines of the log about reloads."""
        return [entry["message"] for entry in self.entries() if "reload" in entry["message"]]

    async def hang_up(self) -> str:
        """Send SIGHUP, and return what the log says of it."""
        before = len(self.outcomes())
        self.signal(signal.SIGHUP)
        await until(lambda: len(self.outcomes()) > before)
        return self.outcomes()[before]

    async def post(self, session: aiohttp.ClientSession, token: str = ADMIN) -> Reply:
        """Ask the operators' listener for a reload."""
        headers = {"Authorization": f"Bearer {token}", "Connection": "close"}
        async with session.post(f"{self.operators}/admin/reload", headers=headers) as response:
            return Reply(response.status, response.headers, await response.read())

    async def command(self, *arguments: str) -> int:
        """Run `pysync reload` and return its exit status."""
        return await asyncio.to_thread(main, ["reload", *(arguments or ["--config", str(self.file)])])


@asynccontextmanager
async def reloading(folder: Path, **members: Any) -> AsyncIterator[ReloadedService]:
    """A service that can be reloaded, with one process unless its members say more."""
    members["server"] = {"admin": {"port": 0}, **members.get("server", {})}
    members.setdefault("auth", {"adminToken": ADMIN})
    async with serving(folder, **members) as process:
        service = ReloadedService(process.process, process.base, process.log)
        assert process.process.stdout is not None
        line = b""
        while not line.startswith(b"  operators"):
            line = await process.process.stdout.readline()
        service.operators = line.split()[1].decode().removesuffix("/admin")
        yield service


async def follow(browser: Browser, received: list[str]) -> None:
    """Put the hashes of all events into `received`, as a client does that resumes."""
    last_id = ""
    while True:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        stream = await listen(browser, headers=headers, collections="notes")
        try:
            with suppress(EOFError):
                while True:
                    event = (await stream.event()).data
                    assert "reset" not in event
                    received.append(event["hash"])
        finally:
            await stream.close()
        last_id = stream.last_id
