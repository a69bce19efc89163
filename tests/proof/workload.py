"""Clients that ask many nodes at once for all that these must agree on, for a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

from proof.client import Node, ProofClient
from proof.files import content, sha256_of
from proof.history import END, History, Kind, Operation
from proof.service import LIMIT
from proof.signed import ANSWER_LIMIT_S, Request
from pysync.clock import wall_clock_ms

CLIENTS: Final = 32
MARKED: Final = ("counters/marked-1", "counters/marked-2", "counters/marked-3")
PLAIN: Final = ("counters/plain-1", "counters/plain-2", "counters/plain-3")
"""A plain counter holds its number and nothing else: two clients write the same bytes at once. A marked one
says besides whose write it is."""
LOGS: Final = ("logs/1", "logs/2", "logs/3")
FILES: Final = ("files/1", "files/2", "files/3")
EVENTS: Final = ("events/1", "events/2")
METERED: Final = "metered/door"
CROWD: Final = 4 * LIMIT["max_requests"]
CROWDS: Final = 0.02
"""Of the requests for what is metered."""
LAST: Final = "counters/last"
"""Pushed when all others have ended: who is told of it has been told of all."""


FRESH_MS: Final = 280_000
"""Of what is sent again: older signatures would be refused for their time."""
MAX_KEPT: Final = 20_000
OLDEST: Final = 50
ATTEMPTS: Final = 20
"""At one write whose outcome stays unknown, or at reading what is there in the end."""
LEAVES: Final = 0.03
"""Of the writes: the client leaves before it is answered."""
LEAVES_WITHIN_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.04
LONGEST_BACKOFF_S: Final = 0.2
PAD_CHARS: Final = 300
"""The most that an element holds beside its id: logs shall outgrow their heads."""
LONGEST_TAIL: Final = 20
SMALL_BYTES: Final = 20_000
LARGE_BYTES: Final = 3_000_000
"""The most that a file has; beyond 2 MB a bucket gets it in parts."""
LARGE: Final = 0.05
MAX_EVENTS: Final = 20
"""In a batch."""
POLLERS: Final = 4
PAGE: Final = 50
"""Names that a poller asks for."""
MAX_KEPT_BYTES: Final = 65_536
"""Of one request that is kept."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A request that was answered, to be sent again."""

    request: Request
    kind: Kind
    key: str


@dataclass(slots=True)
class Requests:
    """Requests that were answered, of all clients."""

    kept: list[Kept] = field(default_factory=list)

    def keep(self, operation: Operation, request: Request, random: Random) -> None:
        if operation.is_unknown or operation.status == 401 or len(request.text) > MAX_KEPT_BYTES:
            return
        if len(self.kept) >= MAX_KEPT:
            self.kept[random.randrange(MAX_KEPT)] = self.kept[-1]
            self.kept.pop()
        self.kept.append(Kept(request, operation.kind, operation.key))

    def pick(self, random: Random) -> Kept | None:
        """One of the newest, the oldest or any, as often: the oldest are from before a node died."""
        if not self.kept:
            return None
        kept = random.choice((self.kept[-1], random.choice(self.kept[:OLDEST]), random.choice(self.kept)))
        return kept if wall_clock_ms() - kept.request.signed_ms < FRESH_MS else None


class Client(ProofClient):
    """One of the clients that share `requests`."""

    def __init__(
        self, name: str, nodes: Sequence[Node], history: History, random: Random, requests: Requests
    ) -> None:
        super().__init__(name, nodes, history, random)
        self._random = random
        self._requests = requests
        self._ids = 0
        self._time_ms: dict[str, int] = {}
        self._draft = self._new_draft()

    async def run(self, until: float) -> None:
        """Ask for this and that until the monotonic clock says `until`; what has begun then is finished."""
        actions = {
            self._increment: 5,
            self._create_or_delete: 3,
            self._append: 6,
            self._append_twice_at_once: 1,
            self._pull_twice: 2,
            self._read_tail: 3,
            self._upload: 3,
            self._download: 3,
            self._push_events: 3,
            self._replay: 6,
            self._knock: 3,
        }
        while time.monotonic() < until:
            (action,) = self._random.choices(list(actions), list(actions.values()))
            await action()
            await asyncio.sleep(self._random.uniform(0, LONGEST_PAUSE_S))
        self.close()

    async def _increment(self) -> None:
        key = self._random.choice(MARKED + PLAIN)
        for _ in range(ATTEMPTS):
            seen = await self._pull(key)
            if seen.status != 200:
                return
            data = {"n": seen.answer["data"].get("n", 0) + 1}
            if key in MARKED:
                data["by"] = self._new_id()
            pushed = await self.write("push", key, {"data": data, "base": seen.answer["hash"]})
            if pushed.status != 409:
                return

    async def _create_or_delete(self) -> None:
        """Create a draft, or delete the one that is there. Nobody else writes it, and its name comes back."""
        key, hash_ = self._draft
        if hash_:
            written = await self.write("delete", key, {"base": hash_, "once": self._new_id()})
        else:
            sent = {"data": {"id": self._new_id()}, "once": self._new_id()}
            written = await self.write("create", key, sent)
        known = written.status == 200
        self._draft = (key, str(written.answer["hash"])) if known else self._new_draft()

    async def _append(self) -> None:
        await self.write("append", self._random.choice(LOGS), {"data": self._element()})

    async def _append_twice_at_once(self) -> None:
        """The same request twice, to any two nodes: one of them must refuse it."""
        key, sent = self._random.choice(LOGS), {"data": self._element()}
        request = self.writing("append", key, sent)
        nodes = self._random.choices(self.up(), k=2)
        await asyncio.gather(*(self.send(node, "append", key, sent, request) for node in nodes))

    async def _pull_twice(self) -> None:
        """Pull a counter twice: it may not have changed."""
        key = self._random.choice(MARKED + PLAIN)
        seen = await self._pull(key)
        if seen.status == 200:
            await self._pull(key, seen.answer["hash"])

    async def _read_tail(self) -> None:
        key = self._random.choice(LOGS)
        bounds: dict[str, int] = {}
        if self._random.random() < 0.5:
            bounds["checkpoint"] = self._time_ms.get(key, wall_clock_ms() - 1000)
        if not bounds or self._random.random() < 0.5:
            bounds["last"] = self._random.randint(0, LONGEST_TAIL)
        tail, request = await self.tail(self._any_node(), key, bounds)
        await self._after(tail, request)
        if tail.status == 200 and (items := tail.answer["data"].get("items")):
            self._time_ms[key] = self._random.choice(items)["ts"]

    async def _upload(self) -> None:
        key, name = self._random.choice(FILES), self._new_id()
        max_bytes = LARGE_BYTES if self._random.random() < LARGE else SMALL_BYTES
        size = self._random.randint(0, max_bytes)
        request = self.uploading(key, content(name, size))
        sent = {"sha256": sha256_of(name, size), "size": size}
        uploaded = await self.send(self._any_node(), "upload", key, sent, request, self._leave_after_s())
        await self._after(uploaded, request)

    async def _download(self) -> None:
        """Pull a file, and again where another version is there."""
        key, node = self._random.choice(FILES), self._any_node()
        seen, request = await self.download(node, key)
        await self._after(seen, request)
        if seen.status == 200 and seen.answer["hash"]:
            again, request = await self.download(self._any_node(), key, seen.answer["hash"])
            await self._after(again, request)

    async def _push_events(self) -> None:
        ids = [self._new_id() for _ in range(self._random.randint(1, MAX_EVENTS))]
        await self.write("batch", self._random.choice(EVENTS), {"ids": ids})

    async def _replay(self) -> None:
        kept = self._requests.pick(self._random)
        if kept is not None:
            await self.send(self._any_node(), "replay", kept.key, {"kind": kept.kind}, kept.request)

    async def _knock(self) -> None:
        """Once, or now and then so often at once that some exceed the limit on a slow machine, too."""
        count = CROWD if self._random.random() < CROWDS else 1
        await asyncio.gather(*(self.metered(self._any_node(), METERED) for _ in range(count)))

    async def _pull(self, key: str, known: str = "") -> Operation:
        pulled, request = await self.pull(self._any_node(), key, known)
        await self._after(pulled, request)
        return pulled

    async def write(self, kind: Kind, key: str, sent: dict[str, Any]) -> Operation:
        """Push, append, push events, create or delete; under an Idempotency-Key where it has one, and half of
        the time where not, and then until it is known whether it was done."""
        if "once" not in sent and self._random.random() < 0.5:
            sent["once"] = self._new_id()
        for _ in range(ATTEMPTS):
            request = self.writing(kind, key, sent)
            written = await self.send(self._any_node(), kind, key, sent, request, self._leave_after_s())
            await self._after(written, request)
            if not written.is_unknown or "once" not in sent:
                break
        return written

    async def _after(self, operation: Operation, request: Request) -> None:
        """Keep what was answered; wait a little where it was not."""
        self._requests.keep(operation, request, self._random)
        if operation.is_unknown:
            await asyncio.sleep(self._random.uniform(0, LONGEST_BACKOFF_S))

    def _leave_after_s(self) -> float:
        leaves = self._random.random() < LEAVES
        return self._random.uniform(0, LEAVES_WITHIN_S) if leaves else ANSWER_LIMIT_S

    def _any_node(self) -> int:
        return self._random.choice(self.up())

    def _element(self) -> dict[str, Any]:
        return {"id": self._new_id(), "pad": "." * self._random.randint(0, PAD_CHARS)}

    def _new_draft(self) -> tuple[str, str]:
        """Key and hash of a draft that is not there yet."""
        return f"drafts/{self._new_id()}", ""

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.name}-{self._ids}"


class Poller(ProofClient):
    """Somebody who lists the batches of events, from the last one that was named."""

    async def run(self, key: str, random: Random, until: float) -> None:
        """List on until the monotonic clock says `until`."""
        after = ""
        while time.monotonic() < until:
            listed, _ = await self.names(random.choice(self.up()), key, after, PAGE)
            if listed.status == 200 and listed.answer["items"]:
                after = listed.answer["items"][-1]
            await asyncio.sleep(random.uniform(0, LONGEST_BACKOFF_S))
        self.close()


async def load(nodes: Sequence[Node], history: History, random: Random, seconds: float) -> None:
    """All clients for so many seconds."""
    requests = Requests()
    until = time.monotonic() + seconds
    clients = [Client(f"c{n:02}", nodes, history, Random(random.random()), requests) for n in range(CLIENTS)]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run(until))
        for n in range(POLLERS):
            poller = Poller(f"p{n}", nodes, history, Random(random.random()))
            group.create_task(poller.run(EVENTS[n % len(EVENTS)], Random(random.random()), until))


async def push_last(nodes: Sequence[Node], history: History, random: Random) -> str:
    """Push what nobody pushes after; its hash."""
    client = Client(END, nodes, history, random, Requests())
    sent = {"data": {"n": 1, "by": END}, "base": None, "once": END}
    for _ in range(ATTEMPTS):
        pushed = await client.write("push", LAST, sent)
        if pushed.status == 200:
            client.close()
            return str(pushed.answer["hash"])
    raise RuntimeError(f"a push is not answered: {pushed}")


async def read_all(nodes: Sequence[Node], history: History, random: Random) -> None:
    """Read from every node what is there in the end."""
    reader = ProofClient(END, nodes, history, random)
    for node in reader.up():
        for key in (*MARKED, *PLAIN, LAST):
            await _until_answered(partial(reader.pull, node, key))
        for key in LOGS:
            await _until_answered(partial(reader.tail, node, key, {"full": "true"}))
        for key in FILES:
            await _until_answered(partial(reader.download, node, key))
    for key in EVENTS:
        await _read_batches(reader, random, key)
    reader.close()


async def _read_batches(reader: ProofClient, random: Random, key: str) -> None:
    """List all batches, and pull each from any node."""
    after = ""
    while True:
        listed = await _until_answered(partial(reader.names, random.choice(reader.up()), key, after, PAGE))
        for name in listed.answer["items"]:
            await _until_answered(partial(reader.rows, random.choice(reader.up()), f"{key}/{name}"))
            after = name
        if not listed.answer["hasMore"]:
            return


async def _until_answered(reading: Callable[[], Awaitable[tuple[Operation, Request]]]) -> Operation:
    """What is answered. Raises RuntimeError where nothing is, however often it is asked."""
    for _ in range(ATTEMPTS):
        read, _ = await reading()
        if not read.is_unknown:
            return read
        await asyncio.sleep(LONGEST_BACKOFF_S)
    raise RuntimeError(f"a read is not answered: {read}")
