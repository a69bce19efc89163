"""The plan of an erasure: the objects and entries of lists that go with a page of keys, and entries of
keyrings. Also the report of what was erased and what stays."""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from pysync import _core
from pysync.auth.certificates import user_id
from pysync.changelog import Change
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.engine.append_log import chunk_keys, log_prefix
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.history import entries_of
from pysync.engine.subscriptions import Topic
from pysync.erase.scope import EraseRequest, Scope, is_public_key, keyring_templates
from pysync.errors import Conflict, DocumentCorrupt
from pysync.plugins import PluginContext
from pysync.plugins.projection.lists import ListWriter
from pysync.plugins.projection.sources import ChangedSource, DocumentLocation
from pysync.store import DamagedFile, Store, StoredObject

PLAN_KEYS: Final = 128
"""The number of keys of a plan."""

_KEPT: Final = {
    "backups": "earlier backups keep it until they are purged, and copies as they are",
    "bucketVersions": "a bucket with versioning keeps earlier versions until its rules delete them",
    "followers": "clients that pulled it have their own copies",
    "memory": "caches of running processes keep it until it is displaced, or a restart",
    "nonces": "digests of signed requests expire within 15 minutes",
}
_KEPT_OF_IDENTITY: Final = {
    "documentsOfOthers": "documents and files at keys without this identity that it wrote, or that name it",
    "logsOfOthers": "elements of this identity in logs at keys without it: they are not rewritten",
    "revocations": "its revocation list, without which revoked certificates would be valid again",
}
_KEPT_IN_KEYRINGS: Final = (
    "%d keyrings of others may have entries for this identity, which name an X25519 key and not whose it is: "
    "erase again with its X25519 keys, as --kem-key or kemKeys; they are `kemPub` in what `pysync keys show` "
    "prints of its key file, and `subKem` in certificates for its devices"
)
_SIGNED_IN_KEYRINGS: Final = (
    "entries that this identity added for others, who could not open them without its signature, in %d "
    "keyrings: %s"
)
MAX_NAMED: Final = 100
"""Number of keyrings that a report names."""


@dataclass(slots=True)
class EraseReport:
    """The number of erased objects by kind, and the bytes of documents, heads of logs and files. Of what is
    left: the number of keyrings, and the keys of those with entries that the identity has signed."""

    erased: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    keyrings: int = 0
    signed_keyrings: list[str] = field(default_factory=list)

    @property
    def is_found(self) -> bool:
        """True if there was anything to erase."""
        return self.erased.total() > 0

    def describe(self, request: EraseRequest, *, is_dry_run: bool) -> dict[str, Any]:
        """Return the report for an operator, with what an erasure does not touch."""
        kept = _KEPT | (_KEPT_OF_IDENTITY if request.kind == "identity" else {})
        if self.keyrings and not request.kem_keys:
            kept |= {"keyrings": _KEPT_IN_KEYRINGS % self.keyrings}
        if self.signed_keyrings:
            named = ", ".join(sorted(self.signed_keyrings)[:MAX_NAMED])
            kept |= {"keyringSignatures": _SIGNED_IN_KEYRINGS % (len(self.signed_keyrings), named)}
        counts = {kind: count for kind, count in sorted(self.erased.items()) if count}
        found = {"dryRun": is_dry_run, "found": self.is_found, "erased": counts, "bytes": self.bytes}
        return request.members | found | {"notTouched": kept}


class PlannedObject(NamedTuple):
    """A document, log or file that goes: its version and hash, and the head if it is a log."""

    key: str
    etag: str
    hash: str = ""
    head: _core.LogHead | None = None

    @property
    def log_ids(self) -> list[str]:
        """The ids of the logs whose objects this head names."""
        return [] if self.head is None else [id_ for id_ in (self.head.id, self.head.previous) if id_]


@dataclass(slots=True)
class ErasePlan:
    """The objects that go with some keys: `objects` at these keys, and what depends on them, namely objects
    at `other` keys, and `entries` of lists, as pairs of a list's key and an entry's id."""

    objects: list[PlannedObject] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    entries: list[tuple[str, str]] = field(default_factory=list)


class Planner:
    """Makes plans for keys of one service."""

    def __init__(self, lists: ListWriter, services: PluginContext) -> None:
        self._lists = lists
        self._services = services
        self._store = services.store

    async def plan(self, keys: Sequence[str], report: EraseReport) -> ErasePlan:
        """Return what goes with the objects at `keys`, and add it to the report. Keys without an object are
        left out. Raises StoreUnavailable."""
        plan = ErasePlan()

        async def add(key: str) -> None:
            versions = await entries_of(self._store, key)
            plan.other += versions
            report.erased["versions"] += len(versions)
            found = await self._store.get(key)
            if isinstance(found, StoredObject):
                plan.objects.append(await self._object(key, found, plan, report))
            elif (file := await self._file(key, report)) is not None:
                plan.objects.append(file)

        await gather_bounded(CONCURRENT, keys, add)
        plan.entries = await self._entries([each.key for each in plan.objects])
        report.erased["entries"] += len(plan.entries)
        return plan

    def locations(self, key: str) -> list[DocumentLocation]:
        """Return the collections that the key belongs to, of all namespaces."""
        return self._lists.keys.locate_all(DocumentRef("", {}, key=key), lambda namespace, name: True)

    def topics(self, key: str) -> set[Topic]:
        """Return the names of these collections."""
        return {(location.namespace, location.name) for location in self.locations(key)}

    def removals(self, key: str, hash_: str, now_ms: int) -> list[Change]:
        """Return the change that announces the removal of the version with this hash; none for a key that no
        collection has."""
        locations = self.locations(key)[:1]
        return [location.document_ref.change(hash_, now_ms, removed=True) for location in locations]

    async def _object(
        self, key: str, found: StoredObject, plan: ErasePlan, report: EraseReport
    ) -> PlannedObject:
        report.bytes += len(found.body)
        try:
            if _core.is_log(found.body) or any(location.kind == "log" for location in self.locations(key)):
                report.erased["logs"] += 1
                plan.other += await chunk_keys(self._store, key)
                head = _core.LogHead.read(found.body, "")
                planned = PlannedObject(key, found.etag, head.hash, head)
                report.erased["elements"] += head.count - head.start
                for id_ in planned.log_ids:
                    report.erased["segments"] += len(
                        [each async for each in self._store.walk(log_prefix(id_))]
                    )
                return planned
            report.erased["documents"] += 1
            return PlannedObject(key, found.etag, _core.read_document(found.body).hash)
        except DocumentCorrupt:
            report.erased["damaged"] += 1
            return PlannedObject(key, found.etag)

    async def _file(self, key: str, report: EraseReport) -> PlannedObject | None:
        try:
            stat = await self._store.stat(key)
        except DamagedFile as error:
            planned = PlannedObject(key, error.etag)
            report.erased["damaged"] += 1
        else:
            if stat is None:
                return None
            planned = PlannedObject(key, stat.etag, stat.sha256)
            report.bytes += stat.size
        report.erased["files"] += 1
        return planned

    async def _entries(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """Return the entries that projections have made from what is at these keys now."""
        entries: dict[tuple[str, str], None] = {}
        for projection in self._lists.projections:
            sources = [
                ChangedSource(location)
                for key in keys
                for location in self.locations(key)
                if projection.reads(location.namespace, location.name)
            ]
            async for _, event in self._lists.sources.events(sources):
                if isinstance(event, DocumentCorrupt):
                    continue
                target = self._lists.target_key(projection, event)
                change = self._lists.entry_change(projection, event)
                if target is not None and change is not None:
                    entries[target, change.id] = None
        return list(entries)

    async def remove_keyring_entries(
        self, request: EraseRequest, scope: Scope, report: EraseReport, *, dry_run: bool = False
    ) -> None:
        """Remove the entries for the X25519 keys of a request from all keyrings that `scope` leaves, also
        from their earlier epochs, announce it, and add to the report what went and what is left. An author
        proof of a changed keyring is dropped, since it no longer matches. Raises Unavailable."""
        if request.kind != "identity":
            return
        async for key in self._keyrings():
            while not scope.includes(key):
                found = await self._store.get(key)
                if not isinstance(found, StoredObject):
                    break
                try:
                    document = _core.read_document(found.body)
                except DocumentCorrupt:
                    break
                data = orjson.loads(document.data)
                count = _drop(data, request.kem_keys)
                if count and not dry_run:
                    body = _core.decode_push(orjson.dumps({"data": data, "baseHash": document.hash}))
                    locations = self.locations(key)
                    context = next((WriteContext(location.document_ref) for location in locations), None)
                    try:
                        await self._services.documents.push(key, body, None, context)
                    except Conflict:
                        continue
                entries = [*_keyring_entries(data)]
                report.erased["keyringEntries"] += count
                report.keyrings += bool(entries)
                if any(_added_by(entry) == request.value for entry in entries):
                    report.signed_keyrings.append(key)
                break

    async def _keyrings(self) -> AsyncIterator[str]:
        """Yield the keys of all keyrings, each once."""
        collections = [collection for _, _, collection in self._services.config.each_collection()]
        seen = set[str]()
        for template in set(keyring_templates(collections)):
            folder = template.prefix if template.params else template.prefix.rpartition("/")[0]
            async for listed in self._store.walk(folder):
                if template.matches(listed.key) and listed.key not in seen:
                    seen.add(listed.key)
                    yield listed.key


def _keyring_entries(data: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries of a keyring; none of any other document."""
    epochs = data.get("epochs") if isinstance(data, dict) else None
    for epoch in epochs.values() if isinstance(epochs, dict) else ():
        entries = epoch.get("wrappedKeys") if isinstance(epoch, dict) else None
        if isinstance(entries, list):
            yield from (entry for entry in entries if isinstance(entry, dict))


def _added_by(entry: dict[str, Any]) -> str | None:
    """Return the user id of who added an entry; None if that is no key."""
    adder = entry.get("addedBy")
    return user_id(adder) if isinstance(adder, str) and is_public_key(adder) else None


def _drop(data: Any, kem_keys: Collection[str]) -> int:
    """Remove the entries of these recipients from the data of a keyring, and return their number; 0 for any
    other document."""
    epochs = data.get("epochs") if isinstance(data, dict) else None
    count = 0
    for epoch in epochs.values() if isinstance(epochs, dict) else ():
        entries = epoch.get("wrappedKeys") if isinstance(epoch, dict) else None
        if isinstance(entries, list):
            kept = [one for one in entries if not (isinstance(one, dict) and one.get("subKem") in kem_keys)]
            count += len(entries) - len(kept)
            epoch["wrappedKeys"] = kept
    return count


async def delete_log_objects(store: Store, ids: Iterable[str]) -> None:
    """Delete the objects of these logs."""
    for id_ in ids:
        keys = [listed.key async for listed in store.walk(log_prefix(id_))]
        await gather_bounded(CONCURRENT, keys, store.delete)
