"""Revocation lists: published once, honoured by every node within seconds (wire section 3)."""

from collections.abc import Callable
from dataclasses import dataclass

from pysync.caps import Certificate, RevocationList, read_revocation_list
from pysync.errors import StaleGeneration, StoreUnavailable, TooManyIssuers
from pysync.store import ABSENT, Etag, EtagMismatch, Expect, NotModified, Store

PREFIX = "_pysync/revocations"
RECHECK_MS = 3_000
MAX_ISSUERS = 10_000
_ATTEMPTS = 8
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class _Known:
    """What the store held for an issuer when it was last asked."""

    found: RevocationList | None
    etag: str | None
    asked_at_ms: int


class Revocations:
    """The revocation lists of a store, each asked for again when it was last seen 3 s ago."""

    def __init__(self, store: Store, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._now_ms = now_ms
        self._known: dict[str, _Known] = {}

    async def revoked(self, certificate: Certificate) -> bool:
        """Whether the certificate's issuer took it back. Raises StoreUnavailable where nobody can tell."""
        issuer = certificate.iss_user_id
        known = self._known.get(issuer)
        if known is None or self._now_ms() - known.asked_at_ms > RECHECK_MS:
            known = await self._ask(issuer)
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
            if known.found is None:
                await self._refuse_too_many()
            elif known.found.generation >= new.generation:
                raise StaleGeneration
            expect: Expect = ABSENT if known.etag is None else Etag(known.etag)
            try:
                etag = await self._store.put(f"{PREFIX}/{issuer}", new.text, expect=expect)
            except EtagMismatch:
                continue
            self._known[issuer] = _Known(new, etag, self._now_ms())
            return new.generation
        raise StoreUnavailable

    async def _ask(self, issuer: str) -> _Known:
        known = self._known.pop(issuer, None)
        asked_at_ms = self._now_ms()
        object_ = await self._store.get(f"{PREFIX}/{issuer}", known.etag if known else None)
        if isinstance(object_, NotModified) and known is not None:
            fresh = _Known(known.found, known.etag, asked_at_ms)
        elif object_ is None or isinstance(object_, NotModified):
            fresh = _Known(None, None, asked_at_ms)
        else:
            fresh = _Known(read_revocation_list(object_.body), object_.etag, asked_at_ms)
        if len(self._known) >= MAX_ISSUERS:
            del self._known[next(iter(self._known))]
        self._known[issuer] = fresh
        return fresh

    async def _refuse_too_many(self) -> None:
        """Raise TooManyIssuers where one more would be over the limit."""
        count, after = 0, None
        while names := await self._store.list(PREFIX, after, _PAGE):
            count, after = count + len(names), names[-1]
            if count >= MAX_ISSUERS:
                raise TooManyIssuers
