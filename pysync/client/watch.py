"""The change stream, read across reconnects and restarts of the server."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
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
    """One event of the stream: the joined lines of its data (None without any), its type (`""` for a message)
    and its id (None without one)."""

    data: str | None
    event: str
    id: str | None


class SSEParser:
    """Parses the events of one connection. An event that is unfinished when the connection ends is
    dropped."""

    def __init__(self) -> None:
        self.retry_s = 0.0
        """Seconds that the server asks to wait before the next connection; 0 if it does not say."""
        self._rest = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[str] = []
        self._data_size = 0
        self._event = ""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that `chunk` completes, wherever chunks split lines and characters; without those
        that have neither data nor id. Raises ValueError for one above MAX_EVENT_BYTES."""
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
"""A stream that is silent for this long counts as dead: servers send a heartbeat every 4 s."""

Connect = Callable[[Mapping[str, str], float], AbstractAsyncContextManager[aiohttp.StreamReader]]
"""Opens the stream: the headers to send along, and the seconds after which it is dead if nothing comes."""


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """A write that was applied, to the document of `collection` with these values of its path parameters.
    `hash` is what a pull returns unless the document was written again. For an append, `timestamp_ms` is the
    timestamp of its element. `namespace` is None at the root. `id` is the event's position in the stream,
    opaque to clients.

    `removed` is True if the document was removed, and `hash` is `""` then. Pull it to be sure: it may have
    been created again since."""

    collection: str
    params: Mapping[str, str]
    hash: str
    timestamp_ms: int
    namespace: str | None
    id: str
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """Changes after the position are lost, and any document may have changed: pull everything again. `id` is
    the position from which the stream continues."""

    id: str


@dataclass(frozen=True, slots=True)
class ChangesPage:
    """The latest changes of documents after a cursor, in their order; the `id` of each is `""`. `cursor` is
    the position after them: with `has_more` another page follows.

    With `is_reset` the server cannot tell what changed, and any document may have: compare everything with
    it, and continue from `cursor`. If it was restored from a backup with `--accept-newer`, `restored_ms` is
    the time of the backup."""

    changes: Sequence[ChangeEvent]
    cursor: str
    has_more: bool = False
    is_reset: bool = False
    restored_ms: int | None = None


def changes_page(body: dict[str, Any]) -> ChangesPage:
    """Return the page in a response."""
    changes = [_change(as_object(change), "") for change in body.get("changes", ())]
    is_reset, has_more = body.get("reset") is True, body.get("hasMore") is True
    return ChangesPage(changes, str(body["cursor"]), has_more, is_reset, body.get("restored"))


def is_retryable(error: Exception) -> bool:
    """Return True if the request may succeed later: the server is unreachable, busy or unwell."""
    if isinstance(error, PysyncError):
        return error.status >= 500 or isinstance(error, RateLimited | RequestTimeout)
    return isinstance(error, Unreachable)


class Watch:
    """An async iterator over each `ChangeEvent` from a position on, and a `Reset` if some were lost. It ends
    when it is closed, which closes its connection at once; only one task may wait for it.

    As an async context manager it is entered once the stream is live. Documents pulled inside, together with
    the changes that follow, are therefore complete:

        async with client.watch(["notes"]) as changes:
            note = await client.pull("notes/hello")
            async for change in changes: ...

    Changes of one document keep their order. A change may come twice. `last_event_id` is the id of the
    newest.
    """

    def __init__(self, stream: "ReconnectingStream") -> None:
        # The iteration does not know this object: when nobody has it any more it is closed, too.
        self._stream = stream
        self._events = stream.follow()

    @property
    def last_event_id(self) -> str | None:
        """The id of the newest event; None before the first. A watch `after` it continues from here, also in
        another process."""
        return self._stream.last_event_id or None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeEvent | Reset:
        while (event := await anext(self._events)) is None:
            pass
        return event

    async def __aenter__(self) -> Self:
        if not self._stream.was_live:
            await anext(self._events)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection and end the iteration."""
        await self._events.aclose()


@dataclass(kw_only=True)
class ReconnectingStream:
    """The events of a watch over successive connections. `last_event_id` is as for a watch, `""` for none;
    `was_live` is True if any connection delivered something."""

    connect: Connect
    last_event_id: str
    idle_s: float
    on_disconnect: Callable[[Exception], None]
    on_connect: Callable[[], None]
    backoff: RetryPolicy
    jitter: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    was_live: bool = False
    _parser: SSEParser = field(default_factory=SSEParser, init=False)

    async def follow(self) -> AsyncGenerator[ChangeEvent | Reset | None]:
        """Yield every event, and None each time that a stream becomes live."""
        failures, is_live = 0, False
        while True:
            try:
                async with self.connect(self._headers(), self.idle_s) as content:
                    self._parser = SSEParser()
                    async for chunk in content.iter_any():
                        if is_live:
                            failures = 0  # it lasts: not one that is cut as soon as it is opened
                        for event in self._parse(chunk):
                            if not is_live:
                                is_live = self.was_live = True
                                self.on_connect()
                                yield None
                            if event is not None:
                                yield event
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
                self.on_disconnect(error)
            is_live = False
            await self.sleep(wait_s)

    def _headers(self) -> dict[str, str]:
        # A proxy that compresses the stream would hold it back.
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
        return headers | {"Last-Event-ID": self.last_event_id} if self.last_event_id else headers

    def _parse(self, chunk: bytes) -> Iterator[ChangeEvent | Reset | None]:
        """Yield the events in `chunk` and move the position; None if they only show that the stream is
        live."""
        try:
            for block in self._parser.feed(chunk):
                position = self.last_event_id if block.id is None else block.id
                event = _parse_event(block, position)
                self.last_event_id = position  # only now: an event that cannot be parsed is not skipped
                yield event
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable("the stream of changes is not understood") from error
        if self.last_event_id:
            yield None

    def _wait_s(self, failures: int, error: Exception) -> float | None:
        """Return the seconds to wait before connecting again; None to give up if no connection ever
        succeeded."""
        requested_s = max(retry_after_s(error), self._parser.retry_s)
        if self.was_live:
            return self.backoff.pause_s(failures, requested_s, self.jitter())
        return self.backoff.wait_s(failures, requested_s, self.jitter())


def _parse_event(event: ServerSentEvent, last_event_id: str) -> ChangeEvent | Reset | None:
    """Return the change in an event; None if it only moves the position, or its type is unknown."""
    if event.event == "reset":
        return Reset(last_event_id)
    if event.data is None or event.event not in ("", "message"):
        return None
    return _change(as_object(orjson.loads(event.data)), last_event_id)


def _change(change: dict[str, Any], id_: str) -> ChangeEvent:
    return ChangeEvent(
        collection=change["collection"],
        params=as_object(change.get("params", {})),
        hash=change["hash"],
        timestamp_ms=change["timestamp"],
        namespace=change.get("namespace"),
        id=id_,
        removed=change.get("removed") is True,
    )
