"""Handlers of requests, and the components that they share."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pysync.auth.authentication import Authenticator
from pysync.auth.rate_limits import RateLimiter
from pysync.auth.revocation import RevocationRegistry
from pysync.concurrency import WriteDeadline
from pysync.config import Config
from pysync.coordinator import Coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import AppendLogs, LogRange, LogSettings
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import Outbox
from pysync.errors import DocumentCorrupt, PysyncError
from pysync.feed import ObjectVersion
from pysync.plugins.hooks import Hooks
from pysync.server.authorization import Access, Authorizer
from pysync.server.http.in_flight import BytesInFlight
from pysync.server.http.router import Match, Router
from pysync.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The components of one service that its handlers use. `key_owners` has one table for each namespace,
    which maps a key to the collection that owns it, by its policy for pulls."""

    config: Config
    store: Store
    coordinator: Coordinator
    documents: Documents
    logs: AppendLogs
    files: Files
    outbox: Outbox
    authenticator: Authenticator
    authorizer: Authorizer
    rate_limiter: RateLimiter
    revocations: RevocationRegistry
    hooks: Hooks
    corruption: CorruptionReporter
    write_deadline: WriteDeadline
    in_flight: BytesInFlight
    key_owners: Sequence[Router]

    async def visible_version(self, match: Match, access: Access, hash_: str, written_ms: int) -> str:
        """Return the version that the caller gets for the hash and time of what is stored at a key."""
        versions = self.documents.versions
        return await versions.load_and_compute(match.key, hash_, written_ms, access.hidden)

    async def known_versions(self, keys: Collection[str]) -> dict[str, ObjectVersion]:
        """Return the versions of those objects at these keys that the store knows without reading them."""
        store = self.store.transactional
        return {} if store is None else await store.feed.versions(keys)

    async def stored_version(self, key: str, log: LogSettings | None) -> ObjectVersion | None:
        """Return the hash and time of the document, log or file at `key` by reading it; None if nothing is
        stored. A damaged one has the hash `""`: a pull of it says what is wrong."""
        try:
            if log is not None:
                tail = await self.logs.read(key, LogRange(newest=1), log)
                return ObjectVersion(tail.hash, tail.newest_ms)
            document = await self.documents.get_version(key)
            if document is not None:
                return ObjectVersion(document.hash, document.ts_ms)
            file = await self.files.stat(key)
        except DocumentCorrupt:
            return ObjectVersion("", 0)
        return None if file is None else ObjectVersion(file.sha256, file.modified_ms)


def owners_of(tables: Iterable[Router], key: str) -> list[Match]:
    """Return the match of a key in each table of `Service.key_owners` in which a collection owns it."""
    found = []
    for table in tables:
        with suppress(PysyncError):
            found.append(table.match("GET", f"/{key}"))
    return found
