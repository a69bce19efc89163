"""The pages with which operators look into the store (docs/reference/protocol.md#inspect). They name keys and
identities, so they need the admin token, and they never show data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from pysync import _core
from pysync.changelog import Change
from pysync.config import Config, HistoryConfig
from pysync.config.check import kind_of, lint
from pysync.errors import BadRequest, DocumentCorrupt
from pysync.migrate import SCRUB_KEY, VERIFY_KEY, VerificationReport
from pysync.migrate.verify import VerificationError, check_stored
from pysync.plugins import PluginContext
from pysync.quotas.accounts import qualified_name
from pysync.server.api import owners_of
from pysync.server.http.router import Router
from pysync.server.process.metrics import Counters
from pysync.store import PAGE, DamagedFile, StoredObject

Json = dict[str, Any]
Query = Mapping[str, str]
NEWEST: Final = 100
"""Changes that are shown."""


def describe_collections(config: Config) -> Json:
    """Return the collections with their roles, and the warnings of `pysync check`."""
    collections = [
        {
            "name": qualified_name(namespace, collection.name),
            "kind": kind_of(collection),
            "storagePath": collection.storage_path,
            "readRoles": collection.read_roles,
            "writeRoles": collection.write_roles,
        }
        for namespace, _, collection in config.each_collection()
    ]
    warnings = [{"location": found.location, "message": found.message} for found in lint(config)]
    return {"collections": collections, "warnings": warnings}


class Inspection:
    """Shows what is stored, on the event loop. `owners` returns those of the `Service` in force, and
    `snapshot` the counters of all workers."""

    def __init__(
        self,
        engine: PluginContext,
        owners: Callable[[], Sequence[Router]],
        snapshot: Callable[[], Counters],
    ) -> None:
        self._snapshot = snapshot
        self._store = engine.store
        self._log = engine.outbox.log
        self._history = engine.documents.history
        self._owners = owners

    async def changes(self, query: Query) -> Json:
        """Return the newest changes, the newest first. Raises Unavailable."""
        return {"changes": [_shown(*each) for each in await self._log.newest(NEWEST)]}

    async def damage(self, query: Query) -> Json:
        """Return the newest reports of damaged objects, and the end and the counts of the last scrub and of
        the last `pysync verify` (None if there was none). Raises StoreUnavailable."""
        newest: dict[str, Json] = {}
        for report in reversed(self._snapshot().recent["damage"]):
            newest.setdefault(report["key"], report)  # others came before it
        page: Json = {"objects": list(newest.values())}
        for name, key in (("scrub", SCRUB_KEY), ("verify", VERIFY_KEY)):
            page[name] = await VerificationReport.recorded(self._store, key)
        return page

    async def object(self, query: Query) -> Json:
        """Return what is stored at the key of the query, of which `kind` is None if nothing is. A document or
        the head of a log is verified; of a file the store says what it knows. Raises BadRequest and
        Unavailable."""
        key = query.get("key", "")
        try:
            _core.split_key(key)
        except ValueError:
            raise BadRequest("key must be that of an object, such as ?key=notes/a") from None
        facts, owners = await self._facts(key), owners_of(self._owners(), key)
        named = b'"key":' + orjson.dumps(key)
        changes = [_shown(*each) for each in await self._log.newest(PAGE) if named in each[1].text]
        kept = next((owner.policy.collection.history for owner in owners), None)
        versions, writer = ([], None) if kept is None else await self._versions(key, kept)
        written = (each["writer"] for each in changes if each["hash"] == facts.get("hash"))
        names = (qualified_name(each.policy.namespace, each.policy.collection.name) for each in owners)
        return {
            "key": key,
            **facts,
            "writer": next(written, writer),
            "change": changes[0] if changes else None,
            "history": versions,
            "collections": [
                {"name": name, "params": owner.params} for name, owner in zip(names, owners, strict=True)
            ],
        }

    async def _facts(self, key: str) -> Json:
        """Return kind, size, times, hash and damage of the object at a key."""
        found = await self._store.get(key)
        if not isinstance(found, StoredObject):
            return await self._file_facts(key)
        kind = "log" if _core.is_log(found.body) else "document"
        facts: Json = {"kind": kind, "size": found.size, "modified": found.modified_ms, "damage": None}
        try:
            head = await check_stored(key, found.body)
            if head is not None:
                return facts | {"hash": head.hash, "timestamp": head.ts_ms, "elements": head.count}
            document = _core.read_document(found.body)
        except VerificationError as error:
            return facts | {"damage": str(error)}
        except DocumentCorrupt:  # an object of the server's own
            return facts | {"kind": "internal"}
        author = document.author_pubkey
        return facts | {"hash": document.hash, "timestamp": document.ts_ms, "authorPubkey": author}

    async def _file_facts(self, key: str) -> Json:
        try:
            found = await self._store.stat(key)
        except DamagedFile as error:
            return {"kind": "file", "damage": error.detail}
        if found is None:
            return {"kind": None}
        facts: Json = {"kind": "file", "size": found.size, "modified": found.modified_ms, "damage": None}
        return facts | {"hash": found.sha256, "contentType": found.content_type}

    async def _versions(self, key: str, limits: HistoryConfig) -> tuple[list[Json], str | None]:
        """Return the earlier versions of a document, the newest first, and who wrote the current one, if its
        history says so."""
        writers: dict[tuple[str, int], str] = {}
        versions: list[Json] = []
        async for entry in self._history.entries(key, limits):
            writers[entry.hash, entry.at_ms] = entry.identity
            if (replaced := entry.replaced) is not None:
                version: Json = {"hash": replaced.hash, "timestamp": replaced.ts_ms, "replaced": entry.at_ms}
                versions.append(version)
        for each in versions:
            each["writer"] = writers.get((each["hash"], each["timestamp"])) or None
        return versions, next(iter(writers.values()), None) or None


def _shown(id_: str, change: Change) -> Json:
    return {"id": id_, **orjson.loads(change.text), "writer": change.identity or None}
