"""Revocation lists: published once, honoured by every node within seconds (wire section 3)."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from pysync.caps import Revocable, RevocationList, read_revocation_list
from pysync.errors import (
    BadSignature,
    InvalidRevocation,
    StaleGeneration,
    StoreUnavailable,
    TooManyIssuers,
)
from pysync.store import ABSENT, Etag, EtagMismatch, Expect, NotModified, Object, Store

PREFIX = "_pysync/revocations"
RECHECK_MS = 3_000
MAX_ISSUERS = 10_000
MAX_KNOWN_BYTES = 16 * 1024 * 1024
_ATTEMPTS = 8
_PAGE = 1000

log = logging.getLogger("pysync.server")


@dataclass(frozen=True, slots=True)
class _Known:
    """What the store held for an issuer when it was last asked. `size` is the list's length in bytes."""

    found: RevocationList | None
    etag: str | None
    asked_at_ms: int
    size: int = 0
    unreadable: bool = False


class Revocations:
    """The revocation lists of a store, each asked for again when it was last seen 3 s ago. Lists of issuers
    in `trusted` find room whatever others publish."""

    def __init__(self, store: Store, now_ms: Callable[[], int], trusted: Collection[str] = ()) -> None:
        self._store = store
        self._now_ms = now_ms
        self._trusted = frozenset(trusted)
        self._known: dict[str, _Known] = {}
        self._known_bytes = 0

    async def revoked(self, certificate: Revocable) -> bool:
        """Whether the certificate's issuer took it back. Raises StoreUnavailable where nobody can tell."""
        issuer = certificate.iss_user_id
        known = self._known.get(issuer)
        if known is None or self._now_ms() - known.asked_at_ms > RECHECK_MS:
            known = await self._ask(issuer)
        if known.unreadable:
            raise StoreUnavailable
        return known.found is not None and known.found.revokes(certificate)

    async def publish(self, text: bytes) -> int:
        """Store a signed list and return its generation.

        Raises:
            InvalidRevocation, BadSignature: as `read_revocation_list`.
            StaleGeneration: the issuer has published this generation or a later one.
            TooManyIssuers: 10,000 issuers have lists here, and this one has none.
        """
        new = read_revocation_list(text)
        issuer = new.iss_user_id
        for _ in range(_ATTEMPTS):
            known = await self._ask(issuer)
            if known.found is not None and known.found.generation >= new.generation:
                raise StaleGeneration
            if known.etag is None and new.iss not in self._trusted:
                await self._refuse_too_many()
            expect: Expect = ABSENT if known.etag is None else Etag(known.etag)
            try:
                await self._store.put(f"{PREFIX}/{issuer}", new.text, expect=expect)
            except EtagMismatch:
                continue
            self._forget(issuer)
            return new.generation
        raise StoreUnavailable

    async def _ask(self, issuer: str) -> _Known:
        known = self._known.get(issuer)
        asked_at_ms = self._now_ms()
        stored = await self._store.get(f"{PREFIX}/{issuer}", known.etag if known else None)
        if stored is None:
            fresh = _Known(None, None, asked_at_ms)
        elif isinstance(stored, NotModified):
            assert known is not None
            fresh = replace(known, asked_at_ms=asked_at_ms)
        else:
            fresh = _read(stored, asked_at_ms)
        self._keep(issuer, fresh)
        return fresh

    def _keep(self, issuer: str, known: _Known) -> None:
        self._forget(issuer)
        self._known[issuer] = known
        self._known_bytes += known.size
        while len(self._known) > MAX_ISSUERS or self._known_bytes > MAX_KNOWN_BYTES:
            self._forget(next(iter(self._known)))

    def _forget(self, issuer: str) -> None:
        known = self._known.pop(issuer, None)
        if known is not None:
            self._known_bytes -= known.size

    async def _refuse_too_many(self) -> None:
        """Raise TooManyIssuers where one more would be over the limit."""
        count, after = 0, None
        while names := await self._store.list(PREFIX, after, _PAGE):
            count, after = count + len(names), names[-1]
            if count >= MAX_ISSUERS:
                raise TooManyIssuers


def _read(stored: Object, asked_at_ms: int) -> _Known:
    """What is stored for an issuer. What does not read as a list refuses everybody it might revoke, until its
    issuer publishes another."""
    try:
        found = replace(read_revocation_list(stored.body), text=b"")
    except (InvalidRevocation, BadSignature):
        log.critical("a stored revocation list cannot be read: its issuer's certificates are refused")
        return _Known(None, stored.etag, asked_at_ms, unreadable=True)
    return _Known(found, stored.etag, asked_at_ms, len(stored.body))
