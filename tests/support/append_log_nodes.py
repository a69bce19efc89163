"""Nodes over one store, and append logs as plain values."""

import asyncio
import builtins
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from pysync._core import Append, decode_append
from pysync.coordinator import Coordinator
from pysync.engine.append_log import AppendLogs, LogRange, LogSettings
from pysync.engine.idempotency import IdempotentRequest
from pysync.model import WriteResult
from pysync.protocol import JSON_TYPE
from pysync.store import ANY, NotModified, Precondition, Store, StoredObject
from pysync.testing import FakeClock
from support import reference_append_log as twin
from support.faulty_store import FaultyStore

KEY = "logs/a"
RULES = LogSettings()


async def nothing(key: str) -> None:
    """What others do before a put, unless a test says more."""


class Node(FaultyStore):
    """One node's way to a shared store, and its `logs`.

    `put_sizes` are the bytes of each of its puts, in turn, `got` the keys that it read. `before_put` is
    awaited with the key of each put, as if others came in between. `listed` is what each listing finds, if it
    is given, whatever has been deleted meanwhile.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        clock: FakeClock,
        head_bytes: int | None = 700,
        ahead_ms: int = 0,
    ) -> None:
        super().__init__(store)
        self.coordinator = coordinator
        self.put_sizes: list[int] = []
        self.before_put: Callable[[str], Awaitable[None]] = nothing
        self.got: list[str] = []
        self.listed: list[str] | None = None
        self.logs = AppendLogs(self, coordinator, lambda: clock() + ahead_ms, head_bytes=head_bytes)

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        self.got.append(key)
        return await super().get(key, if_none_match)

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        self.put_sizes.append(len(body))
        await self.before_put(key)
        return await super().put(key, body, content_type, expect)

    async def append(self, *datas: Any, rules: LogSettings = RULES, key: str = KEY) -> list[WriteResult]:
        """Append one after another; a `twin.Element` as it is, other values as data."""
        return [await self.logs.append(key, element(data), rules) for data in datas]

    async def append_at_once(
        self, datas: Iterable[Any], rules: LogSettings = RULES, key: str = KEY
    ) -> list[Any]:
        """Append all at once; what each was told, errors too."""
        appends = (self.logs.append(key, element(data), rules) for data in datas)
        return await asyncio.gather(*appends, return_exceptions=True)

    async def once(self, data: Any, request_key: str, rules: LogSettings = RULES) -> WriteResult:
        body = element(data)
        return await self.logs.append(KEY, body, rules, request=repeatable(request_key, body))

    async def elements(
        self, *bounds: int | None, rules: LogSettings = RULES, key: str = KEY
    ) -> list[dict[str, Any]]:
        """The elements within the bounds, as they are read back."""
        tail = await self.logs.read(key, LogRange(*bounds), rules)
        return parsed(await tail.text())

    async def datas(self, *bounds: int | None, rules: LogSettings = RULES, key: str = KEY) -> list[Any]:
        return [element["data"] for element in await self.elements(*bounds, rules=rules, key=key)]

    async def hash(self, rules: LogSettings = RULES, key: str = KEY) -> str:
        return (await self.logs.read(key, LogRange(newest=0), rules)).hash

    async def list(self, prefix: str, after: str | None, limit: int) -> builtins.list[str]:
        return await super().list(prefix, after, limit) if self.listed is None else self.listed


def repeatable(request_key: str, body: Append) -> IdempotentRequest:
    return IdempotentRequest(request_key, hashlib.sha256(body.canonical).hexdigest())


def element(data: Any) -> Append:
    wanted = data if isinstance(data, twin.Element) else twin.Element(None, data)
    return decode_append(wanted.body)


def parsed(text: bytes) -> list[Any]:
    elements: list[Any] = json.loads(b"[%b]" % text)
    return elements


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Data of elements that no other is like."""
    return [{"n": n} for n in range(start, start + count)]


async def keys_below(store: Store, prefix: str) -> list[str]:
    return sorted([listed.key async for listed in store.walk(prefix)])


async def store_values(store: Store, values: dict[str, Any]) -> None:
    """Store values as JSON, as Starfish does."""
    for key, value in values.items():
        await store.put(key, json.dumps(value).encode())


def log_of(datas: Sequence[Any], ts_ms: int) -> twin.Log:
    """A log whose elements are a millisecond apart."""
    return twin.Log(tuple(twin.Element(ts_ms + n, data) for n, data in enumerate(datas)))


MakeNode = Callable[..., Node]
