"""Deletes expired documents, logs and files, which reads no longer return, and lets old elements leave logs.

With an index by time a sweep reads what has expired. Otherwise, as in a bucket, it lists a bounded number of
keys, and the next sweep continues behind them.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final, NamedTuple

from pysync.clock import is_stable
from pysync.concurrency import every
from pysync.config import Collection
from pysync.config.key_templates import KeyTemplate
from pysync.engine.append_log import AppendLogs, LogSettings
from pysync.engine.changes import DocumentRef
from pysync.engine.documents import Documents
from pysync.errors import DocumentCorrupt, PysyncError
from pysync.server.http.router import Route, Router
from pysync.store import KeyShape, ListEntry, Store

SWEEP_EVERY_S = 60.0
"""Seconds between two rounds of a job that looks for what is due."""
MAX_LISTED: Final = 10_000
"""The number of keys of a collection that one sweep lists to find expired ones: ten pages of a bucket."""
MAX_READ: Final = 1_000
"""The number of keys of a collection that one sweep lists to find logs with old elements, each of which it
reads."""

log = logging.getLogger("pysync.server")


class SweptCollection(NamedTuple):
    """A collection whose data expires. `shape` is that of its keys, `ref_of` returns the reference to the
    document of a key, None if the key belongs to another collection."""

    collection: Collection
    shape: KeyShape
    ref_of: Callable[[str], DocumentRef | None]

    @property
    def prefix(self) -> str:
        """The prefix of all keys."""
        parts = list(self.shape[:-1])
        return "/".join(part for part in parts[: parts.index(None) if None in parts else None] if part)


class TtlSweeper:
    """Deletes expired data of one service, if any collection has a `ttlMs`, or logs whose old elements leave.
    The deletion of expired data is announced."""

    def __init__(
        self,
        store: Store,
        documents: Documents,
        logs: AppendLogs,
        routes: Router,
        clock: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._store = store
        self._index = store.time_index
        self._documents = documents
        self._logs = logs
        swept = _swept_collections(routes)
        self._expiring = [each for each in swept if each.collection.ttl_ms is not None]
        self._shrinking = [each for each in swept if _drops_elements(each.collection)]
        self._listed: dict[tuple[str, KeyShape], str] = {}
        """The key behind which the next sweep continues, by purpose and shape."""

    async def run(self) -> None:
        """Sweep at intervals, until cancelled."""
        if self._expiring or self._shrinking:
            await every(SWEEP_EVERY_S, self.sweep, "failed to delete expired data", log)

    async def sweep(self) -> int:
        """Delete expired data, and return the number of documents, logs and files. Deletes nothing within ten
        minutes of a step of the clock."""
        if not is_stable(self._clock):
            return 0
        if self._index is not None and self._expiring:
            await self._index.prepare({each.shape for each in self._expiring})
        for each in self._shrinking:
            await self._shorten_logs(each)
        return sum([await self._delete_expired(each) for each in self._expiring])

    async def _delete_expired(self, swept: SweptCollection) -> int:
        collection, deleted = swept.collection, 0
        assert collection.ttl_ms is not None, "these collections are the expiring ones"
        settings = None if collection.append_only is None else LogSettings.from_collection(collection)
        async for listed in self._candidates(swept, self._clock() - collection.ttl_ms):
            ref = swept.ref_of(listed.key)
            if ref is None:
                continue
            if settings is not None:
                deleted += await self._logs.delete_expired(listed, settings, ref)
            else:
                deleted += await self._documents.delete_expired(listed, ref, collection.ttl_ms)
        return deleted

    async def _candidates(self, swept: SweptCollection, before_ms: int) -> AsyncIterator[ListEntry]:
        """Yield the objects of a collection that were last written before this time; without an index only
        those among the next keys."""
        if self._index is not None:
            async for listed in self._index.written_before(swept.shape, before_ms):
                yield listed
            return
        async for listed in self._next("expiry", swept, MAX_LISTED):
            if listed.modified_ms < before_ms:
                yield listed

    async def _shorten_logs(self, swept: SweptCollection) -> None:
        """Let old elements leave the next logs of a collection."""
        settings = LogSettings.from_collection(swept.collection)
        async for listed in self._next("retention", swept, MAX_READ):
            if swept.ref_of(listed.key) is not None:
                with suppress(DocumentCorrupt):  # it has been reported
                    await self._logs.drop_oldest(listed.key, settings)

    async def _next(self, purpose: str, swept: SweptCollection, count: int) -> AsyncIterator[ListEntry]:
        """Yield the next `count` objects, and continue behind them when called again. At the end, the next
        call starts from the beginning."""
        at = (purpose, swept.shape)
        after, listed = self._listed.pop(at, None), 0
        async for entry in self._store.walk(swept.prefix, after):
            yield entry
            listed += 1
            if listed == count:
                self._listed[at] = entry.key
                return


def _drops_elements(collection: Collection) -> bool:
    return collection.append_only is not None and LogSettings.from_collection(collection).drops_elements


def _swept_collections(routes: Router) -> list[SweptCollection]:
    """Return every collection once, with the shape of its keys."""
    found: dict[tuple[str | None, str], SweptCollection] = {}
    for method, route in routes:
        policy = route.policy
        if policy is None or route.action not in ("pull", "push", "append") or route.alias:
            continue
        found.setdefault((policy.namespace, policy.collection.name), _swept(routes, method, route))
    return list(found.values())


def _swept(routes: Router, method: str, route: Route) -> SweptCollection:
    policy = route.policy
    assert policy is not None, "it is the route of a collection"
    name, namespace = policy.collection.name, policy.namespace
    files = route.files
    if files is not None and files.template is not None:
        template, suffix = files.template, files.suffix

        def file_ref(key: str) -> DocumentRef | None:
            if not files.matches_key(key):
                return None
            return DocumentRef(name, template.params_of(key.removesuffix(suffix)), namespace, key)

        return SweptCollection(policy.collection, key_shape(template, suffix), file_ref)

    head = "/" + "/".join(route.template[: route.key_from])

    def ref(key: str) -> DocumentRef | None:
        with suppress(PysyncError):
            match = routes.match(method, f"{head}/{key}")
            if match.route is route:
                return DocumentRef(name, match.params, namespace, key)
        return None

    return SweptCollection(
        policy.collection, key_shape(KeyTemplate("/".join(route.template[route.key_from :]))), ref
    )


def key_shape(template: KeyTemplate, suffix: str = "") -> KeyShape:
    """Return the shape of the keys of a template with this suffix, which a last parameter includes."""
    *above, last = (
        None if is_open else part
        for part, is_open in zip(template.segments, template.open_segments, strict=True)
    )
    return (*above, None if last is None else last + suffix)
