"""Revocation lists, which all nodes apply within seconds of their publication.

Anyone may publish one. A stranger is an issuer that the configuration does not name and that owns no stored
data. Lists of strangers must be short and revoke something, and are dropped once all their entries have
expired, so that they cost little and cannot crowd out the lists of others.

See docs/reference/protocol.md#revocation-lists.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final, ParamSpec, TypeVar

from pysync._core import RevocationList as SignedList
from pysync.auth.certificates import CertificateSummary, RevocationList, parse_revocation_list
from pysync.auth.issuing import DROPPED_AFTER_S
from pysync.cache import CACHED_BYTES, CACHED_ENTRIES, BoundedCache
from pysync.clock import elapsed_of, is_stable
from pysync.concurrency import ATTEMPTS, every
from pysync.config import Config
from pysync.errors import (
    BadSignature,
    InvalidRevocation,
    PayloadTooLarge,
    StaleGeneration,
    StoreUnavailable,
    TooManyIssuers,
)
from pysync.store import (
    ABSENT,
    RELIST_MS,
    Etag,
    EtagMismatch,
    NotModified,
    Precondition,
    Store,
    StoredObject,
)

PREFIX: Final = "_pysync/revocations"
RECHECK_MS: Final = 3_000
"""Milliseconds for which a list, and the count of all lists, is not read again."""
MAX_ISSUERS: Final = 10_000
"""Number of lists above which strangers may not add theirs."""
MAX_UNTRUSTED_BYTES: Final = 16_384
"""Bytes of a stranger's list. Longer lists are parsed in a thread."""

log = logging.getLogger("pysync.server")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _CachedList:
    """The list of an issuer, as last read from the store. `found` is None if it cannot be parsed. `size` is
    its length in bytes; in memory it takes less."""

    found: RevocationList | None
    etag: str
    size: int
    fetched_at_ms: int


class Ownership:
    """Identities that own stored data. An identity owns the keys below its `{identity}` in collections whose
    path has only literal segments before it; one page of a listing shows them for each such collection. Keys
    elsewhere, for example in rooms that anyone may name, do not count."""

    def __init__(self, config: Config, store: Store) -> None:
        self._store = store
        self._prefixes = sorted(set(_identity_prefixes(config)))
        self._owners = BoundedCache[str, bool](CACHED_ENTRIES)

    async def owns_data(self, identity: str) -> bool:
        """Return True if `identity` owns stored data, which is then cached. Raises StoreUnavailable."""
        if self._owners.get(identity):
            return True
        for folder, is_whole_key in self._prefixes:
            key = folder + identity
            if await self._exists(key, is_whole_key):
                self._owners.put(identity, True)
                return True
        return False

    async def _exists(self, key: str, is_whole_key: bool) -> bool:
        if is_whole_key:
            return await self._store.get(key) is not None
        walk = self._store.walk(key)
        try:
            return await anext(walk, None) is not None
        finally:
            if isinstance(walk, AsyncGenerator):
                await walk.aclose()


def _identity_prefixes(config: Config) -> Iterator[tuple[str, bool]]:
    """Yield the part of each template before `{identity}`, and True if nothing follows it."""
    for _, _, collection in config.each_collection():
        before, identity, after = collection.storage_path.partition("{identity}")
        if identity and "{" not in before:
            yield before, not after and collection.bundle is None


async def _owns_nothing(identity: str) -> bool:
    return False


class RevocationRegistry:
    """The revocation lists of a store. A cached list is read again after 3 s. Issuers whose user id is in
    `trusted`, or for whom `owns_data` returns True, are not strangers."""

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
        self._elapsed_ms = elapsed_of(now_ms)
        self._trusted_lists = BoundedCache[str, _CachedList](sys.maxsize)
        self._lists = BoundedCache[str, _CachedList](CACHED_BYTES, lambda cached: cached.size)
        self.unlisted_until_ms = BoundedCache[str, int](CACHED_ENTRIES)
        """Issuers that had no list when it was last read, with the elapsed time at which to read again."""
        self._count, self._counted_at_ms = 0, 0

    def use(self, trusted: Collection[str], owns_data: Callable[[str], Awaitable[bool]]) -> None:
        """Take others for strangers from now on."""
        moved, self._trusted, self._owns_data = self._trusted ^ set(trusted), frozenset(trusted), owns_data
        for issuer in moved:
            self._trusted_lists.evict(issuer)
            self._lists.evict(issuer)

    async def is_revoked(self, certificate: CertificateSummary) -> bool:
        """Return True if the issuer revoked the certificate. Raises StoreUnavailable."""
        issuer = certificate.iss_user_id
        known = self._cache_of(issuer).get(issuer)
        if known is None or self._elapsed_ms() - known.fetched_at_ms > RECHECK_MS:
            known = await self._fetch(issuer)
        if known is None:
            return False
        if known.found is None:
            raise StoreUnavailable
        return known.found.revokes(certificate)

    async def publish(self, text: bytes) -> int:
        """Store a signed list and return its generation.

        Cheap checks come first: a list that is not newer is rejected before its signature is verified.

        Raises:
            InvalidRevocation: not a revocation list, or a stranger's that revokes nothing.
            PayloadTooLarge: a stranger's list of more than 16 KB.
            StaleGeneration: the issuer has published this generation or a later one.
            BadSignature: the issuer did not sign it.
            TooManyIssuers: 10,000 issuers have lists here, and this stranger has none.
            StoreUnavailable: the store does not answer, or too many writers compete.
        """
        new = await _in_thread_if_large(text, SignedList.parse, text)
        if new is None:
            raise InvalidRevocation
        issuer, is_checked = new.iss_user_id, False
        for _ in range(ATTEMPTS):
            known = await self._fetch(issuer)
            if known is not None and known.found and known.found.generation >= new.generation:
                raise StaleGeneration
            if not is_checked:
                is_stranger = await self._validate(new, text)
                is_checked = True
            if is_stranger and known is None:
                await self._check_issuer_count()
            expect: Precondition = ABSENT if known is None else Etag(known.etag)
            try:
                await self._store.put(f"{PREFIX}/{issuer}", new.text, expect=expect)
            except EtagMismatch:
                continue
            self._count += known is None
            self._evict(issuer)
            return new.generation
        raise StoreUnavailable

    async def published(self, issuer: str) -> bytes | None:
        """Return the stored list of a user id, None if none can be parsed. Raises StoreUnavailable."""
        stored = await self._store.get(f"{PREFIX}/{issuer}")
        if not isinstance(stored, StoredObject):
            return None
        return stored.body if await _in_thread_if_large(stored.body, SignedList.parse, stored.body) else None

    async def delete_expired(self) -> int:
        """Delete the lists of strangers whose entries have all expired, and return their number. Deletes
        nothing within ten minutes of a step of the clock."""
        dropped = 0
        if not is_stable(self._now_ms):
            return dropped
        async for listed in self._store.walk(PREFIX):
            issuer = listed.key.removeprefix(f"{PREFIX}/")
            if issuer not in self._trusted and await self._drop_expired(issuer):
                dropped += 1
        self._counted_at_ms = 0
        return dropped

    async def delete_expired_periodically(self) -> None:
        """Run `delete_expired` once an hour, until cancelled."""
        await every(RELIST_MS / 1000, self.delete_expired, "failed to drop expired revocation lists", log)

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
        """Return True if the list is a stranger's. Raises as `publish` if the list is rejected."""
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

    async def _fetch(self, issuer: str) -> _CachedList | None:
        known = self._cache_of(issuer).get(issuer)
        read_at_ms = self._elapsed_ms()
        stored = await self._store.get(f"{PREFIX}/{issuer}", known.etag if known else None)
        self._evict(issuer)
        if stored is None:
            self.unlisted_until_ms.put(issuer, read_at_ms + RECHECK_MS)
            return None
        if isinstance(stored, NotModified):
            assert known is not None
            fresh = replace(known, fetched_at_ms=read_at_ms)
        else:
            fresh = await _in_thread_if_large(stored.body, _parse_stored, stored, read_at_ms)
        self._cache_of(issuer).put(issuer, fresh)
        return fresh

    def _cache_of(self, issuer: str) -> BoundedCache[str, _CachedList]:
        return self._trusted_lists if issuer in self._trusted else self._lists

    def _evict(self, issuer: str) -> None:
        self._cache_of(issuer).evict(issuer)
        self.unlisted_until_ms.evict(issuer)

    async def _check_issuer_count(self) -> None:
        """Raise TooManyIssuers if another list would exceed the limit."""
        now_ms = self._now_ms()
        if not 0 <= now_ms - self._counted_at_ms < RECHECK_MS:
            count = 0
            async for _ in self._store.walk(PREFIX):
                count += 1
                if count == MAX_ISSUERS:
                    break
            self._count, self._counted_at_ms = count, now_ms
        if self._count >= MAX_ISSUERS:
            raise TooManyIssuers


async def _in_thread_if_large(text: bytes, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call `work`, which handles a list, in a thread if the list is long."""
    if len(text) > MAX_UNTRUSTED_BYTES:
        return await asyncio.to_thread(work, *args, **options)
    return work(*args, **options)


def _parse_stored(stored: StoredObject, fetched_at_ms: int) -> _CachedList:
    """Return the stored list of an issuer. If it does not parse, every certificate that it might revoke is
    rejected until the issuer publishes another."""
    try:
        found = replace(parse_revocation_list(stored.body), text=b"")
    except (InvalidRevocation, BadSignature):
        log.critical("failed to parse a stored revocation list: rejecting the certificates of its issuer")
        return _CachedList(None, stored.etag, len(stored.body), fetched_at_ms)
    return _CachedList(found, stored.etag, len(stored.body), fetched_at_ms)
