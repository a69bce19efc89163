"""Changes told as they are made: the change stream, followed across cuts and restarts (wire section 9).

Server-sent events, read: bytes as they come, blocks as they are meant.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import aiohttp
import orjson

from pysync.client.models import as_object
from pysync.client.transport import RetryPolicy, Unreachable, retry_after_s
from pysync.errors import PysyncError, RateLimited, RequestTimeout

MAX_EVENT_BYTES: Final = 1 << 20
_END_OF_LINE: Final = re.compile(rb"\r\n?|\n")
_BOM: Final = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """What stands between two blank lines, but for comments: the joined lines of its data (None: it has
    none), the name of its event (`""`: a message), and its id (None: it has none)."""

    data: str | None
    event: str
    id: str | None


class SSEParser:
    """Reads the blocks of one connection. What the connection's end leaves unfinished is no block."""

    def __init__(self) -> None:
        self.retry_s = 0.0
        """How long the server asks to wait before the next connection; 0 where it does not say."""
        self._rest = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[str] = []
        self._data_size = 0
        self._event = ""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The blocks that end in `chunk`, however lines and characters are split between chunks; not those
        without data and id. Raises ValueError for one of more than MAX_EVENT_BYTES."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the line ended with the chunk before
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._rest = _END_OF_LINE.split(self._rest + chunk)
        found = [block for line in lines if (block := self._line(line)) is not None]
        if len(self._rest) + self._data_size > MAX_EVENT_BYTES:
            raise ValueError("an event is too long")
        return found

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if self._at_start:
            line, self._at_start = line.removeprefix(_BOM), False
        if not line:
            return self._finish_event()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        self._field(name, value.removeprefix(" "))
        return None

    def _field(self, name: str, value: str) -> None:
        match name:
            case "data":
                self._data.append(value)
                self._data_size += len(value) + 1
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if re.fullmatch("[0-9]{1,8}", value):
                self.retry_s = int(value) / 1000

    def _finish_event(self) -> ServerSentEvent | None:
        block = ServerSentEvent("\n".join(self._data) if self._data else None, self._event, self._id)
        self._data, self._data_size, self._event, self._id = [], 0, "", None
        return None if block.data is None and block.id is None else block


IDLE_S: Final = 15.0
"""A stream that says nothing for so long is taken for dead: servers say something every 4 s."""

Connect = Callable[[Mapping[str, str], float], AbstractAsyncContextManager[aiohttp.StreamReader]]
"""Opens the stream: the headers to send along, and the seconds after which it is dead if nothing comes."""


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """A write that was applied: to the document of `collection` at these values of its path's parameters.
    `hash` is what a pull gives unless it was written again; of an append, `timestamp_ms` is its element's
    time. `namespace` is None at the root. `id` is its place in the stream, for this server to understand."""

    collection: str
    params: Mapping[str, str]
    hash: str
    timestamp_ms: int
    namespace: str | None
    id: str


@dataclass(frozen=True, slots=True)
class Reset:
    """What came after the place is not known any more: anything may have changed, so pull everything again.
    `id` is the place from which changes are told again."""

    id: str


def is_retryable(error: Exception) -> bool:
    """Whether it may go well the next time: the server is out of reach, or busy, or not well."""
    if isinstance(error, PysyncError):
        return error.status >= 500 or isinstance(error, RateLimited | RequestTimeout)
    return isinstance(error, Unreachable)


class Watch:
    """An async iterator of each `ChangeEvent` from a place on, and of a `Reset` where some are lost. It ends
    when it is closed, which closes its connection at once; no two tasks may wait for it together.

    As an async context manager it is entered when the server tells of all that is written from then on: what
    is pulled inside, and the changes that follow, leave nothing out.

        async with client.watch(["notes"]) as changes:
            note = await client.pull("notes/hello")
            async for change in changes: ...

    Changes of one document keep their order. One may come twice; the one that came last is `last_event_id`.
    """

    def __init__(self, stream: "ReconnectingStream") -> None:
        # The iteration does not know this object: when nobody has it any more it is closed, too.
        self._stream = stream
        self._events = stream.follow()

    @property
    def last_event_id(self) -> str | None:
        """The id of what came last: a watch `after` it goes on from here, also in another process. None
        before the server told one."""
        return self._stream.last_event_id or None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeEvent | Reset:
        while (told := await anext(self._events)) is None:
            pass
        return told

    async def __aenter__(self) -> Self:
        if not self._stream.was_live:
            await anext(self._events)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection and end."""
        await self._events.aclose()


class ReconnectingStream:
    """What a watch iterates over: one connection after another. `last_event_id` is as for a watch, `""` for
    none; `was_live` says whether there was one that told anything."""

    def __init__(
        self,
        connect: Connect,
        *,
        after: str | None,
        idle_s: float,
        on_disconnect: Callable[[Exception], None],
        on_connect: Callable[[], None],
        backoff: RetryPolicy,
        jitter: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._connect = connect
        self.last_event_id = after or ""
        self.was_live = False
        self._idle_s = idle_s
        self._on_disconnect = on_disconnect
        self._on_connect = on_connect
        self._backoff = backoff
        self._jitter = jitter
        self._sleep = sleep
        self._parser = SSEParser()

    async def follow(self) -> AsyncGenerator[ChangeEvent | Reset | None]:
        """All that is told, and None each time that a stream has become live, before anything of it."""
        failures, is_live = 0, False
        while True:
            try:
                async with self._connect(self._headers(), self._idle_s) as content:
                    self._parser = SSEParser()
                    async for chunk in content.iter_any():
                        if is_live:
                            failures = 0  # it lasts: not one that is cut as soon as it is opened
                        for told in self._parse(chunk):
                            if not is_live:
                                is_live = self.was_live = True
                                self._on_connect()
                                yield None
                            if told is not None:
                                yield told
                raise Unreachable("the stream of changes ended")
            except (PysyncError, Unreachable) as caught:
                if not is_retryable(caught):
                    raise
                error = caught
            failures += 1
            wait_s = self._wait_s(failures, error)
            if wait_s is None:
                raise error
            if is_live:
                self._on_disconnect(error)
            is_live = False
            await self._sleep(wait_s)

    def _headers(self) -> dict[str, str]:
        # A proxy that compresses the stream would hold it back.
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
        return headers | {"Last-Event-ID": self.last_event_id} if self.last_event_id else headers

    def _parse(self, chunk: bytes) -> Iterator[ChangeEvent | Reset | None]:
        """What `chunk` tells, the place moving along; None for signs that the stream is live."""
        try:
            for block in self._parser.feed(chunk):
                place = self.last_event_id if block.id is None else block.id
                told, self.last_event_id = (
                    _parse_event(block, place),
                    place,
                )  # what cannot be read is not passed by
                yield told
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable("the stream of changes is not understood") from error
        if self.last_event_id:
            yield None

    def _wait_s(self, failures: int, error: Exception) -> float | None:
        """How long to wait before connecting again, None to give up, as before anything came."""
        asked_s = max(retry_after_s(error), self._parser.retry_s)
        if self.was_live:
            return self._backoff.pause_s(failures, asked_s, self._jitter())
        return self._backoff.wait_s(failures, asked_s, self._jitter())


def _parse_event(event: ServerSentEvent, last_event_id: str) -> ChangeEvent | Reset | None:
    """None for a block that only moves the place, or tells what is not known here."""
    if event.event == "reset":
        return Reset(last_event_id)
    if event.data is None or event.event not in ("", "message"):
        return None
    told: dict[str, Any] = as_object(orjson.loads(event.data))
    return ChangeEvent(
        collection=told["collection"],
        params=as_object(told.get("params", {})),
        hash=told["hash"],
        timestamp_ms=told["timestamp"],
        namespace=told.get("namespace"),
        id=last_event_id,
    )
