"""Handlers of requests, and the components that they share."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pysync.auth.authentication import Authenticator
from pysync.auth.rate_limits import RateLimiter
from pysync.auth.revocation import RevocationRegistry
from pysync.concurrency import WriteDeadline
from pysync.config import Config
from pysync.coordinator import Coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import Outbox
from pysync.errors import PysyncError
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


def owners_of(tables: Iterable[Router], key: str) -> list[Match]:
    """Return the match of a key in each table of `Service.key_owners` in which a collection owns it."""
    found = []
    for table in tables:
        with suppress(PysyncError):
            found.append(table.match("GET", f"/{key}"))
    return found
