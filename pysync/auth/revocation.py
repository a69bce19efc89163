"""Revocation lists: published once, honoured by every node within seconds.

Anybody may publish one. A stranger is an issuer that the configuration does not name and that owns nothing
stored here. Lists of strangers must be short and revoke something, and are dropped when all entries have
expired, so that they neither cost much nor take the room of others.

See docs/reference/protocol.md#revocation-lists.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, ParamSpec, TypeVar

from pysync._core import RevocationList as SignedList
from pysync.auth.certificates import Revocable, RevocationList, parse_revocation_list
from pysync.clock import is_stable
from pysync.concurrency import every
from pysync.errors import (
    BadSignature,
    InvalidRevocation,
    PayloadTooLarge,
    StaleGeneration,
    StoreUnavailable,
    TooManyIssuers,
)
from pysync.store import ABSENT, Etag, EtagMismatch, NotModified, Precondition, Store, StoredObject

PREFIX: Final = "_pysync/revocations"
RECHECK_MS: Final = 3_000
MAX_ISSUERS: Final = 10_000
"""Number of lists up to which strangers may add theirs."""
MAX_UNTRUSTED_BYTES: Final = 16_384
CACHE_BYTES: Final = 16 * 1024 * 1024
"""Bytes of cached entries, those of trusted issuers apart: some 500,000 entries."""
BYTES_PER_LIST: Final = 500
BYTES_PER_ENTRY: Final = 32
IN_THREAD_ABOVE: Final = 16_384
"""Lists of more bytes than this are parsed in a thread."""
DROPPED_AFTER_S: Final = 86_400
"""Seconds after the expiry of its last entry at which a list is dropped: a clock that is wrong for a moment
drops nothing that still counts."""
SWEEP_EVERY_S: Final = 3600.0
COUNT_TTL_MS: Final = 60_000
"""Time for which a count of the lists is good, together with those that this process adds."""
_ATTEMPTS = 8
_PAGE = 1000

log = logging.getLogger("pysync.server")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _CachedList:
    """The state of an issuer's list when the store was last asked."""

    found: RevocationList | None
    etag: str | None
    fetched_at_ms: int
    unreadable: bool = False

    @property
    def size(self) -> int:
        entries = 0 if self.found is None else len(self.found.revoked)
        return BYTES_PER_LIST + BYTES_PER_ENTRY * entries


async def _owns_nothing(identity: str) -> bool:
    return False


class RevocationRegistry:
    """The revocation lists of a store, each read again when its copy is 3 s old. User ids in `trusted`, and
    those that own something (`owns_data`), are no strangers."""

    def __init__(
        self,
        store: Store,
        now_ms: Callable[[], int],
        trusted: Collection[str] = (),
        owns_data: Callable[[str], Awaitable[bool]] = _owns_nothing,
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._trusted = frozenset(trusted)
        self._owns_data = owns_data
        self._cached_trusted: dict[str, _CachedList] = {}
        self._cached: dict[str, _CachedList] = {}
        self._cached_bytes = 0
        self._count, self._counted_at_ms = 0, 0

    async def is_revoked(self, certificate: Revocable) -> bool:
        """Whether the certificate's issuer took it back. Raises StoreUnavailable where nobody can tell."""
        issuer = certificate.iss_user_id
        known = self._cache_of(issuer).get(issuer)
        if known is None or self._now_ms() - known.fetched_at_ms > RECHECK_MS:
            known = await self._fetch(issuer)
        if known.unreadable:
            raise StoreUnavailable
        return known.found is not None and known.found.revokes(certificate)

    async def publish(self, text: bytes) -> int:
        """Store a signed list and return its generation.

        What is cheap to tell is told first: a list that is not newer costs no check of its signature.

        Raises:
            InvalidRevocation: no revocation list, or a stranger's that takes nothing back.
            PayloadTooLarge: a stranger's of more than 16 KB.
            StaleGeneration: the issuer has published this generation or a later one.
            BadSignature: its issuer did not sign it.
            TooManyIssuers: 10,000 issuers have lists here, and this stranger has none.
        """
        new = await _in_thread_if_large(text, SignedList.parse, text)
        if new is None:
            raise InvalidRevocation
        issuer, is_checked = new.iss_user_id, False
        for _ in range(_ATTEMPTS):
            known = await self._fetch(issuer)
            if known.found is not None and known.found.generation >= new.generation:
                raise StaleGeneration
            if not is_checked:
                is_stranger = await self._validate(new, text)
                is_checked = True
            if is_stranger and known.etag is None:
                await self._check_issuer_count()
            expect: Precondition = ABSENT if known.etag is None else Etag(known.etag)
            try:
                await self._store.put(f"{PREFIX}/{issuer}", new.text, expect=expect)
            except EtagMismatch:
                continue
            self._count += known.etag is None
            self._evict(issuer)
            return new.generation
        raise StoreUnavailable

    async def published(self, issuer: str) -> bytes | None:
        """The list of an issuer (user id) as it is stored, None where there is none that can be read. Raises
        StoreUnavailable."""
        stored = await self._store.get(f"{PREFIX}/{issuer}")
        if not isinstance(stored, StoredObject):
            return None
        return stored.body if await _in_thread_if_large(stored.body, SignedList.parse, stored.body) else None

    async def delete_expired(self) -> int:
        """Drop the lists of strangers of which every entry has expired, and return their number. None within
        ten minutes of a step of the clock."""
        dropped, after = 0, None
        if not is_stable(self._now_ms):
            return dropped
        while names := await self._store.list(PREFIX, after, _PAGE):
            after = names[-1]
            for issuer in names:
                if issuer not in self._trusted and await self._drop_expired(issuer):
                    dropped += 1
        self._counted_at_ms = 0
        return dropped

    async def delete_expired_periodically(self) -> None:
        """`delete_expired` once an hour, for ever."""
        await every(SWEEP_EVERY_S, self.delete_expired, "failed to drop expired revocation lists", log)

    async def _drop_expired(self, issuer: str) -> bool:
        stored = await self._store.get(f"{PREFIX}/{issuer}")
        if not isinstance(stored, StoredObject):
            return False
        parsed = await _in_thread_if_large(stored.body, SignedList.parse, stored.body)
        revoked = None if parsed is None else await _in_thread_if_large(stored.body, parsed.revoked)
        if revoked is None or self._now_ms() // 1000 <= revoked.last_expiry_s + DROPPED_AFTER_S:
            return False
        if await self._owns_data(issuer):
            return False
        try:
            await self._store.delete(f"{PREFIX}/{issuer}", Etag(stored.etag))
        except EtagMismatch:
            return False
        self._evict(issuer)
        return True

    async def _validate(self, new: SignedList, text: bytes) -> bool:
        """Return True if the list is a stranger's. Raises as `publish` does if the list is refused."""
        is_trusted = new.iss_user_id in self._trusted
        is_long = len(text) > MAX_UNTRUSTED_BYTES
        if is_long and not is_trusted and not await self._owns_data(new.iss_user_id):
            raise PayloadTooLarge
        if not await _in_thread_if_large(text, new.is_signed):
            raise BadSignature
        revoked = await _in_thread_if_large(text, new.revoked)
        if revoked is None:
            raise InvalidRevocation
        if is_trusted or is_long or await self._owns_data(new.iss_user_id):
            return False
        if self._now_ms() // 1000 > revoked.last_expiry_s:
            raise InvalidRevocation("Invalid revocation list: name a certificate that has not expired")
        return True

    async def _fetch(self, issuer: str) -> _CachedList:
        known = self._cache_of(issuer).get(issuer)
        asked_at_ms = self._now_ms()
        stored = await self._store.get(f"{PREFIX}/{issuer}", known.etag if known else None)
        if stored is None:
            fresh = _CachedList(None, None, asked_at_ms)
        elif isinstance(stored, NotModified):
            assert known is not None
            fresh = replace(known, fetched_at_ms=asked_at_ms)
        else:
            fresh = await _in_thread_if_large(stored.body, _parse_stored, stored, asked_at_ms)
        self._cache(issuer, fresh)
        return fresh

    def _cache_of(self, issuer: str) -> dict[str, _CachedList]:
        return self._cached_trusted if issuer in self._trusted else self._cached

    def _cache(self, issuer: str, cached: _CachedList) -> None:
        self._evict(issuer)
        self._cache_of(issuer)[issuer] = cached
        if issuer not in self._trusted:
            self._cached_bytes += cached.size
            while self._cached_bytes > CACHE_BYTES:
                self._evict(next(iter(self._cached)))

    def _evict(self, issuer: str) -> None:
        known = self._cache_of(issuer).pop(issuer, None)
        if known is not None and issuer not in self._trusted:
            self._cached_bytes -= known.size

    async def _check_issuer_count(self) -> None:
        """Raise TooManyIssuers where one more would be over the limit."""
        now_ms = self._now_ms()
        if not 0 <= now_ms - self._counted_at_ms < COUNT_TTL_MS:
            count, after = 0, None
            while count < MAX_ISSUERS and (names := await self._store.list(PREFIX, after, _PAGE)):
                count, after = count + len(names), names[-1]
            self._count, self._counted_at_ms = count, now_ms
        if self._count >= MAX_ISSUERS:
            raise TooManyIssuers


async def _in_thread_if_large(text: bytes, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run work on a list, in a thread if the list is long."""
    if len(text) > IN_THREAD_ABOVE:
        return await asyncio.to_thread(work, *args, **options)
    return work(*args, **options)


def _parse_stored(stored: StoredObject, fetched_at_ms: int) -> _CachedList:
    """What is stored for an issuer. What does not read as a list refuses everybody it might revoke, until its
    issuer publishes another."""
    try:
        found = replace(parse_revocation_list(stored.body), text=b"")
    except (InvalidRevocation, BadSignature):
        log.critical("a stored revocation list cannot be read: its issuer's certificates are refused")
        return _CachedList(None, stored.etag, fetched_at_ms, unreadable=True)
    return _CachedList(found, stored.etag, fetched_at_ms)
