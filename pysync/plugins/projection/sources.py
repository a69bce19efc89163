"""The sources of projections as they are now: each write that still stands, as an event."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson

from pysync import _core
from pysync.changelog import Told
from pysync.engine.append_log import Bounds, LogRules
from pysync.errors import DocumentCorrupt
from pysync.model import WriteEvent
from pysync.plugins import Services
from pysync.plugins.projection.keys import Place
from pysync.store import Object

_AT_ONCE: Final = 256
"""Documents that are read together."""


@dataclass(slots=True)
class Touched:
    """A source, and what was told of its writes; nothing told: it is read whole."""

    place: Place
    told: list[Told] = field(default_factory=list)

    @property
    def since_ms(self) -> int | None:
        """When the first of these writes was made."""
        return min((told.timestamp_ms for told in self.told), default=None)


class Sources:
    """Reads what a service stores."""

    def __init__(self, services: Services) -> None:
        self._store = services.store
        self._logs = services.logs
        self._now_ms = services.now_ms
        self._corruption = services.corruption

    async def events(
        self, touched: Sequence[Touched]
    ) -> AsyncIterator[tuple[Touched, WriteEvent | DocumentCorrupt]]:
        """Yield the writes to fold: the last write of each document and file, the elements of each log since
        the first announced write, in order, and all announced writes that are stored nowhere, without a body.
        A missing or expired object yields nothing, an unreadable one the error. `identity` is known if the
        write was announced. Raises StoreUnavailable."""
        documents = [one for one in touched if one.place.kind == "document"]
        for start in range(0, len(documents), _AT_ONCE):
            some = documents[start : start + _AT_ONCE]
            keys = list(dict.fromkeys(one.place.key for one in some))
            found = dict(zip(keys, await self._store.get_many(keys), strict=True))
            for one in some:
                stored = found[one.place.key]
                event = None if stored is None else self._event(one, stored)
                if event is not None:
                    yield one, event
        for one in touched:
            if one.place.kind == "log":
                async for element in self._elements(one):
                    yield one, element
            elif one.place.kind == "file":
                file = await self._file(one)
                if file is not None:
                    yield one, file
            elif one.place.kind == "nothing":
                for told in one.told:
                    yield one, _bodiless(one.place, told.hash, told.timestamp_ms, told.subject.identity)

    async def _file(self, one: Touched) -> WriteEvent | DocumentCorrupt | None:
        try:
            stat = await self._store.stat(one.place.key)
        except DocumentCorrupt as error:
            return error
        ttl_ms = one.place.collection.ttl_ms
        if stat is None or (ttl_ms is not None and stat.modified_ms + ttl_ms < self._now_ms()):
            return None
        writers = {told.hash: told.subject.identity for told in one.told}
        return _bodiless(one.place, stat.sha256, stat.modified_ms, writers.get(stat.sha256, ""))

    def _event(self, one: Touched, stored: Object) -> WriteEvent | DocumentCorrupt | None:
        place = one.place
        try:
            document = _core.read_document(stored.body)
        except DocumentCorrupt as error:
            self._corruption.meet(error, "document", place.key)
            return error
        ttl_ms = place.collection.ttl_ms
        if ttl_ms is not None and document.ts_ms + ttl_ms < self._now_ms():
            return None
        writers = {told.hash: told.subject.identity for told in one.told}
        return WriteEvent(
            place.name,
            place.params,
            document.hash,
            document.ts_ms,
            text=document.data,
            identity=writers.get(document.hash) or None,
            namespace=place.namespace,
        )

    async def _elements(self, one: Touched) -> AsyncIterator[WriteEvent | DocumentCorrupt]:
        place = one.place
        bounds = Bounds(since=None if one.since_ms is None else one.since_ms - 1)
        told = {told.timestamp_ms: told for told in one.told}
        try:
            tail = await self._logs.read(place.key, bounds, LogRules.of(place.collection))
            async for chunk in tail.chunks():
                for element in orjson.loads(b"[%b]" % chunk.strip(b",")):
                    write = told.get(element["ts"])
                    yield WriteEvent(
                        place.name,
                        place.params,
                        "" if write is None else write.hash,
                        element["ts"],
                        text=orjson.dumps(element["data"]),
                        identity=None if write is None else write.subject.identity or None,
                        namespace=place.namespace,
                    )
        except DocumentCorrupt as error:
            yield error


def _bodiless(place: Place, hash_: str, timestamp_ms: int, identity: str) -> WriteEvent:
    return WriteEvent(
        place.name,
        place.params,
        hash_,
        timestamp_ms,
        identity=identity or None,
        namespace=place.namespace,
    )
