"""Plans: what goes with a page of keys. A plan is stored before anything of it is erased, so that a crash
leaves nothing of which only the erased objects knew."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import orjson

from pysync import _core
from pysync.changelog import Change
from pysync.concurrency import gather_bounded
from pysync.engine.append_log import chunk_keys, log_prefix
from pysync.engine.changes import DocumentRef
from pysync.engine.history import entries_of
from pysync.erase.keyrings import KeyringEntries
from pysync.erase.request import EraseRequest
from pysync.errors import DocumentCorrupt
from pysync.plugins import PluginContext
from pysync.plugins.projection.lists import ListWriter
from pysync.plugins.projection.sources import ChangedSource, DocumentLocation
from pysync.store import DamagedFile, Store, StoredObject

PAGE: Final = 128
"""The number of keys of a plan."""
_CONCURRENT: Final = 16

_KEPT: Final = {
    "backups": "earlier backups and copies keep it until they are pruned",
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
    """What went, by kind: the number of objects, and the bytes of documents, heads of logs and files. What is
    left: the number of keyrings, and the keys of those with entries that the identity has signed."""

    erased: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    keyrings: int = 0
    signed_keyrings: list[str] = field(default_factory=list)

    def add(self, other: Self) -> None:
        """Add what another report counts."""
        self.erased.update(other.erased)
        self.bytes += other.bytes
        self.keyrings = max(self.keyrings, other.keyrings)
        self.signed_keyrings = sorted({*self.signed_keyrings, *other.signed_keyrings})

    def add_keyrings(self, found: KeyringEntries) -> None:
        """Add what is removed from keyrings, and what is left in them."""
        self.erased["keyringEntries"] += found.removed
        self.keyrings, self.signed_keyrings = found.keyrings, sorted(found.signed)

    @property
    def is_found(self) -> bool:
        """True if there was anything to erase."""
        return self.erased.total() > 0

    @property
    def members(self) -> dict[str, Any]:
        """The report as JSON members."""
        counts = {kind: count for kind, count in sorted(self.erased.items()) if count}
        return {"erased": counts, "bytes": self.bytes}

    def encode(self) -> dict[str, Any]:
        """Return the members that `parse` takes."""
        return self.members | {"keyrings": self.keyrings, "signedKeyrings": self.signed_keyrings}

    def describe(self, request: EraseRequest, *, is_dry_run: bool) -> dict[str, Any]:
        """Return the report for an operator, with what an erasure does not touch."""
        kept = _KEPT | (_KEPT_OF_IDENTITY if request.kind == "identity" else {})
        if self.keyrings and not request.kem_keys:
            kept |= {"keyrings": _KEPT_IN_KEYRINGS % self.keyrings}
        if self.signed_keyrings:
            named = ", ".join(self.signed_keyrings[:MAX_NAMED])
            kept |= {"keyringSignatures": _SIGNED_IN_KEYRINGS % (len(self.signed_keyrings), named)}
        found = {"dryRun": is_dry_run, "found": self.is_found}
        return request.members | found | self.members | {"notTouched": kept}

    @classmethod
    def parse(cls, members: dict[str, Any]) -> Self:
        """Return the report with these members."""
        left = members.get("keyrings", 0), members.get("signedKeyrings", [])
        return cls(Counter(members["erased"]), members["bytes"], *left)


@dataclass(slots=True)
class ErasePlan:
    """What goes with some keys: `keys` themselves, each with its etag and its hash, `objects` at other keys,
    the ids of `logs`, and `entries` of lists that are kept, as pairs of a list's key and an entry's id."""

    keys: dict[str, tuple[str, str]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    entries: list[tuple[str, str]] = field(default_factory=list)
    report: EraseReport = field(default_factory=EraseReport)

    @property
    def hashes(self) -> set[str]:
        """The hashes of what goes."""
        return {hash_ for _, hash_ in self.keys.values()}

    def encode(self) -> bytes:
        """Return the plan as JSON text."""
        members = {"keys": self.keys, "objects": self.objects, "logs": self.logs, "entries": self.entries}
        return orjson.dumps(members | {"report": self.report.members})

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Return the plan in `text`."""
        members = orjson.loads(text)
        entries = [(key, id_) for key, id_ in members["entries"]]
        report = EraseReport.parse(members["report"])
        keys = {key: (etag, hash_) for key, (etag, hash_) in members["keys"].items()}
        return cls(keys, members["objects"], members["logs"], entries, report)


class Planner:
    """Makes plans for keys of one service."""

    def __init__(self, lists: ListWriter, services: PluginContext) -> None:
        self._lists = lists
        self._store = services.store

    async def plan(self, keys: Sequence[str]) -> ErasePlan:
        """Return what goes with the objects at `keys`. Keys without an object are left out. Raises
        StoreUnavailable."""
        plan = ErasePlan()
        await gather_bounded(_CONCURRENT, keys, lambda key: self._add(plan, key))
        plan.entries = await self._entries(list(plan.keys))
        plan.report.erased["entries"] += len(plan.entries)
        return plan

    def locations(self, key: str) -> list[DocumentLocation]:
        """Return the collections that the key belongs to, of all namespaces."""
        return self._lists.keys.locate_all(DocumentRef("", {}, key=key), lambda namespace, name: True)

    def removals(self, key: str, hash_: str, now_ms: int) -> list[Change]:
        """Return the change that announces the removal of the version with this hash; none for a key that no
        collection has."""
        places = self.locations(key)[:1]
        return [place.document_ref.change(hash_, now_ms, removed=True) for place in places]

    async def _add(self, plan: ErasePlan, key: str) -> None:
        versions = await entries_of(self._store, key)
        plan.objects += versions
        plan.report.erased["versions"] += len(versions)
        found = await self._store.get(key)
        if not isinstance(found, StoredObject):
            await self._add_file(plan, key)
            return
        hash_, kind = "", "documents"
        is_log = _core.is_log(found.body)
        if is_log or any(place.kind == "log" for place in self.locations(key)):
            kind = "logs"
            hash_ = await self._add_log(plan, key, found.body)
        else:
            try:
                hash_ = _core.read_document(found.body).hash
            except DocumentCorrupt:
                plan.report.erased["damaged"] += 1
        plan.keys[key] = found.etag, hash_
        plan.report.erased[kind] += 1
        plan.report.bytes += len(found.body)

    async def _add_log(self, plan: ErasePlan, key: str, body: bytes) -> str:
        """Add the objects of a log with this head, and return its hash."""
        plan.objects += await chunk_keys(self._store, key)
        try:
            head = _core.LogHead.read(body, "")
        except DocumentCorrupt:
            plan.report.erased["damaged"] += 1
            return ""
        plan.report.erased["elements"] += head.count - head.start
        for id_ in filter(None, (head.id, head.previous)):
            plan.logs.append(id_)
            plan.report.erased["segments"] += len([each async for each in self._store.walk(log_prefix(id_))])
        return head.hash

    async def _add_file(self, plan: ErasePlan, key: str) -> None:
        try:
            stat = await self._store.stat(key)
        except DamagedFile as error:
            plan.keys[key] = error.etag, ""
            plan.report.erased["damaged"] += 1
        else:
            if stat is None:
                return
            plan.keys[key] = stat.etag, stat.sha256
            plan.report.bytes += stat.size
        plan.report.erased["files"] += 1

    async def _entries(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """Return the entries that projections have made from what is at these keys now."""
        entries: dict[tuple[str, str], None] = {}
        for projection in self._lists.projections:
            sources = [
                ChangedSource(place)
                for key in keys
                for place in self.locations(key)
                if projection.reads(place.namespace, place.name)
            ]
            async for _, event in self._lists.sources.events(sources):
                if isinstance(event, DocumentCorrupt):
                    continue
                target = self._lists.target_key(projection, event)
                change = self._lists.entry_change(projection, event)
                if target is not None and change is not None:
                    entries[target, change.id] = None
        return list(entries)


async def delete_log_objects(store: Store, ids: Sequence[str]) -> None:
    """Delete the objects of these logs."""
    for id_ in ids:
        keys = [listed.key async for listed in store.walk(log_prefix(id_))]
        await gather_bounded(_CONCURRENT, keys, store.delete)
