"""Clients who follow the change stream of one node or another, and write down what it tells."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import orjson

from proof import service
from proof.client import Node
from proof.history import History, Kind, Operation
from proof.signed import Connection, Device, NoReply, Reply

FOLLOWERS: Final = 4
LONGEST_STREAM_S: Final = 4.0
"""A follower leaves after at most so long, in the midst of whatever, and comes back to any node."""
LONGEST_BACKOFF_S: Final = 0.2
FOLLOWED: Final = ("counters", "drafts", "logs", "files", "events")


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two blank lines of a stream; `id` is the last one that was told."""

    event: str
    data: bytes
    id: str


class Follower:
    """Somebody who follows `nodes`, goes on where the last stream ended, and never asks for anything else."""

    def __init__(self, name: str, nodes: Sequence[Node], history: History, random: Random) -> None:
        self.name = name
        self._nodes = nodes
        self._history = history
        self._random = random
        self._device = Device(random, service.NAMES)
        self._cursor = ""
        self._seen = asyncio.Condition()
        self._keys = set[tuple[str, str]]()
        self._resets = 0

    async def run(self) -> None:
        """Follow until it is cancelled."""
        while True:
            up = [at for at, node in enumerate(self._nodes) if node.address is not None]
            if not up or not await self._follow(self._random.choice(up)):
                await asyncio.sleep(self._random.uniform(0, LONGEST_BACKOFF_S))

    async def has_seen(self, key: str, hash_: str) -> None:
        """Return when it was told of this version, or from now on that it was not told of all."""
        before = self._resets
        async with self._seen:
            await self._seen.wait_for(lambda: (key, hash_) in self._keys or self._resets > before)

    async def _follow(self, node: int, longest_s: float = LONGEST_STREAM_S) -> bool:
        """One stream; whether it told anything."""
        headers = [("Last-Event-ID", self._cursor)] if self._cursor else []
        request = self._device.request(f"/events?collections={','.join(FOLLOWED)}", headers=headers)
        sent: dict[str, Any] = {"after": self._cursor} if self._cursor else {}
        start, status, error = time.monotonic(), None, ""
        try:
            async with asyncio.timeout(self._random.uniform(0, longest_s)):
                with closing(await self._connection(node)) as connection:
                    answer = await connection.stream(request)
                    status = answer.status if isinstance(answer, Reply) else 200
                    if not isinstance(answer, Reply):
                        await self._listen(node, answer, sent)
        except (NoReply, TimeoutError) as lost:
            error = repr(lost)
        followed = self._operation("follow", node, sent, start)
        self._history.add(replace(followed, status=status, nonce=request.nonce, error=error))
        return "opened" in sent

    async def _connection(self, node: int) -> Connection:
        address = self._nodes[node].address
        if address is None:
            raise NoReply("nobody is there")
        return await Connection.to(address)

    async def _listen(self, node: int, chunks: AsyncGenerator[bytes, None], sent: dict[str, Any]) -> None:
        async with aclosing(chunks):
            async for block in blocks(chunks, self._cursor):
                if block.id:
                    sent.setdefault("opened", time.monotonic())
                await self._receive(node, block)

    async def _receive(self, node: int, block: Block) -> None:
        self._cursor = block.id
        if not block.data:
            return
        change, now = orjson.loads(block.data), time.monotonic()
        if block.event == "reset":
            self._history.add(self._operation("reset", node, {"id": block.id}, now))
            async with self._seen:
                self._resets += 1
                self._seen.notify_all()
            return
        key = key_of(change)
        received = self._operation("event", node, {"id": block.id}, now)
        self._history.add(replace(received, key=key, answer=change))
        async with self._seen:
            self._keys.add((key, change["hash"]))
            self._seen.notify_all()

    def _operation(self, kind: Kind, node: int, sent: dict[str, Any], start: float) -> Operation:
        end = time.monotonic()
        return Operation(kind=kind, who=self.name, node=node, sent=sent, start=start, end=end)


def key_of(change: Mapping[str, Any]) -> str:
    """The key that a change names."""
    return "/".join((change["collection"], *change["params"].values()))


async def blocks(chunks: AsyncIterator[bytes], cursor: str) -> AsyncIterator[Block]:
    """The blocks of a stream, each told when its blank line is there; `place` is the id until one comes."""
    rest, event, data = b"", "", b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not line:
                yield Block(event, data, cursor)
                event, data = "", b""
            elif name == b"id":
                cursor = value.decode()
            elif name == b"event":
                event = value.decode()
            elif name == b"data":
                data += value
