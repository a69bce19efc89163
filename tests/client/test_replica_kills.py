"""Replicas whose processes are killed again and again lose no edit, double none, and equal the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.clients import ISSUER
from support.depth import depth
from support.edit_ledger import Ledger, entries_of
from support.http_relay import RequestHead
from support.replica_process import HOME, LOGS, DeviceProcess, Life, device_process, shared_key
from support.replicas import Service
from support.s3_fault_proxy import FaultProxy

from pysync.client import Client, RetryPolicy
from pysync.client.replica.file import TAIL_ELEMENTS
from pysync.errors import Conflict

pytestmark = [pytest.mark.process, pytest.mark.slow]

KILLS = depth(100, 1000)
PATIENT = RetryPolicy(attempts=20, initial_s=0.01)
DEVICES = ("phone", "laptop", "tablet")


class Device:
    """A device whose processes are killed after a number of edits, or while the server serves a request."""

    def __init__(self, name: str, file: Path, process: DeviceProcess, proxy: FaultProxy, seed: str) -> None:
        self._name = name
        self._file = file
        self._process = process
        self._proxy = proxy
        self._random = Random(seed)
        self._number = 0

    async def live(self, ledger: Ledger) -> None:
        """Live until the kill, and note in the ledger what was edited."""
        how = self._random.choice(["away", "edit", "request", "request", "answer", "answer"])
        edits = self._random.randint(1, 12)
        self._fail(how)

        def on_report(members: dict[str, Any]) -> None:
            nonlocal edits
            ledger.note(members)
            edits -= "done" in members
            if "idle" in members or (edits <= 0 and how in ("away", "edit")):
                self._process.kill()

        await self._process.live(self._life(how != "away", 12), on_report)
        self._proxy.reset()

    async def end(self) -> dict[str, Any]:
        """Live on without an edit until all is received and sent, and return what the replica then holds."""
        found: dict[str, Any] = {}

        def on_report(members: dict[str, Any]) -> None:
            found.update(members)
            if "idle" in members:
                self._process.kill()

        await self._process.live(self._life(True, 0), on_report)
        return found

    def _life(self, is_online: bool, edits: int) -> Life:
        self._number += 1
        seed = self._random.randrange(1 << 32)
        return Life(str(self._file), self._proxy.url, self._name, self._number, seed, edits, is_online)

    def _fail(self, how: str) -> None:
        """Have requests of this life fail, one in eight of them without a kill."""
        left = self._random.randint(1, 12)

        def kills(_: RequestHead) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                self._process.kill()
            return left == 0

        def fails(sent: RequestHead) -> bool:
            return sent.path != "events" and self._random.random() < 1 / 16

        if how == "away":
            self._proxy.abort(times=None)
        elif how == "request":
            self._proxy.abort(when=kills)
        elif how == "answer":
            self._proxy.lose_reply(when=kills)
        self._proxy.abort(when=fails, times=None)
        self._proxy.lose_reply(when=fails, times=None)


class OtherClient:
    """A client without a replica, which edits what the devices edit."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._random = Random("other")
        self._count = 0

    async def edit(self, ledger: Ledger, life: int) -> None:
        """Add an entry to a shared document, or delete it, and append to a log."""
        key, log = shared_key(life, self._random), self._random.choice(LOGS)
        self._count += 1
        entry = f"other-{self._count:04}"
        await self._client.append(log, {"id": entry})
        ledger.note({"done": "append", "key": log, "entry": entry})
        with suppress(Conflict):
            pulled = await self._client.pull(key)
            if pulled.hash and self._random.random() < 0.1:
                ledger.note({"begun": "drop", "key": key, "seen": entries_of(pulled.data)})
                await self._client.delete(key, pulled.hash)
            else:
                await self._client.push(key, {**pulled.data, entry: True}, pulled.hash or None)
                ledger.note({"done": "add", "key": key, "entry": entry})


@pytest.mark.timeout(depth(120, 1800))
async def test_no_edit_is_lost_or_doubled_over_100_kills(tmp_path: Path) -> None:
    service, ledger = Service(tmp_path / "data"), Ledger(DEVICES)
    await service.start()
    async with AsyncExitStack() as stack:
        devices = []
        for name in DEVICES:
            process = await stack.enter_async_context(device_process())
            proxy = await stack.enter_async_context(FaultProxy(service.url))
            devices.append(Device(name, tmp_path / f"{name}.db", process, proxy, name))
        client = await stack.enter_async_context(Client(service.url, keys=ISSUER, backoff=PATIENT))
        other, random = OtherClient(client), Random("service")
        for life in range(-(-KILLS // len(DEVICES))):
            async with asyncio.TaskGroup() as lives:
                for device in devices:
                    lives.create_task(device.live(ledger))
                await other.edit(ledger, life)
                if random.random() < 0.2:
                    await service.stop()
                    await service.start()

        for device in devices:
            held = await device.end()
            assert (held["unsent"], held["rejected"]) == (0, [])
        documents = {key: (await client.pull(key)).data async for key in keys_below(client, f"{HOME}/docs")}
        logs = {
            key: [element.data["id"] for element in (await client.pull(key, full=True)).elements()]
            for key in LOGS
        }
        ledger.check_documents(documents)
        for key, stored in logs.items():
            ledger.check_log(key, stored)
        for device in devices:
            held = await device.end()
            assert (held["unsent"], held["rejected"]) == (0, [])
            assert held["documents"] == documents
            assert held["logs"] == {key: stored[-TAIL_ELEMENTS:] for key, stored in logs.items()}
    await service.stop()


async def keys_below(client: Client, prefix: str) -> AsyncIterator[str]:
    async for name in client.list(prefix):
        yield f"{prefix}/{name}"
