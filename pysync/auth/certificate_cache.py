"""The cache of verified certificates, in two generations.

A certificate enters the young generation with the first request that is allowed. It moves to the old one when
it is used again in a later period. Only the young generation makes room for others, so callers who come once,
however many there are, evict no caller who comes regularly.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from pysync.auth.verification import VerifiedCertificate, cache_key_of

MAX_BYTES: Final = 32 * 1024 * 1024
"""Bytes of the cache for trusted callers, and again for all others: about 8,000 callers each."""
MAX_IDENTITY_BYTES: Final = 64 * 1024
"""Bytes of the cache that one identity may use."""
OLD_SHARE: Final = 0.75
"""The share of the cache that the old generation may use."""
PERIOD_MS: Final = 60_000
IDLE_PERIODS: Final = 15
"""Periods without use after which a certificate of the old generation makes room for another."""


class CertificateCache:
    """A cache of verified certificates. Untrusted callers take no room from those that the configuration
    trusts, and one identity uses no more than its share."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._trusted = _Generations(max_bytes)
        self._others = _Generations(max_bytes)

    def get(self, authorization: str, presenter: str, now_ms: int) -> VerifiedCertificate | None:
        """Return the certificate cached for this header, for any presenter or this one; None if none is.
        It counts as used now."""
        period = now_ms // PERIOD_MS
        known = self._others.get(authorization, period) or self._trusted.get(authorization, period)
        if known is None and presenter:
            return self._others.get(cache_key_of(authorization, presenter), period)
        return known

    def put(self, certificate: VerifiedCertificate, now_ms: int) -> None:
        """Cache a verified certificate, once a request with it has been allowed."""
        cache = self._trusted if certificate.is_trusted else self._others
        cache.put(certificate, now_ms // PERIOD_MS)


class _Entry(NamedTuple):
    """A certificate, and the period in which it was put or, in the old generation, last used."""

    certificate: VerifiedCertificate
    period: int


class _Generations:
    """A cache of certificates that is bounded in bytes, in total and for each identity. Each generation is in
    the order of use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._young: OrderedDict[str, _Entry] = OrderedDict()
        self._old: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0
        self._old_bytes = 0
        self._by_identity: dict[str, OrderedDict[str, VerifiedCertificate]] = {}

    def get(self, cache_key: str, period: int) -> VerifiedCertificate | None:
        """Return a cached certificate and mark it as used; None if it is not cached."""
        entry = self._old.get(cache_key)
        if entry is not None:
            self._old.move_to_end(cache_key)
            if entry.period != period:
                self._old[cache_key] = _Entry(entry.certificate, period)
            return entry.certificate
        entry = self._young.get(cache_key)
        if entry is None:
            return None
        self._young.move_to_end(cache_key)
        if entry.period != period:
            self._promote(cache_key, entry.certificate, period)
        return entry.certificate

    def put(self, certificate: VerifiedCertificate, period: int) -> None:
        """Cache a certificate. It evicts others of its identity if their share is exceeded, and the least
        recently used ones of the young generation if the cache is full."""
        cache_key = certificate.cache_key
        if cache_key in self._young or cache_key in self._old:
            return
        own = self._by_identity.setdefault(certificate.caller.identity, OrderedDict())
        total = certificate.size
        if own:
            total += sum(each.size for each in own.values())
            while own and total > MAX_IDENTITY_BYTES:
                oldest = next(iter(own.values()))
                total -= oldest.size
                self._evict(oldest)
        self._by_identity[certificate.caller.identity] = own
        own[cache_key] = certificate
        self._young[cache_key] = _Entry(certificate, period)
        self._bytes += certificate.size
        while self._bytes > self._max_bytes:
            self._evict(next(iter(self._young.values())).certificate)

    def _promote(self, cache_key: str, certificate: VerifiedCertificate, period: int) -> None:
        """Move a certificate to the old generation, if there is room. Those that were not used for long make
        room."""
        while self._old_bytes + certificate.size > self._max_bytes * OLD_SHARE:
            longest_unused = next(iter(self._old.values()), None)
            if longest_unused is None or period - longest_unused.period < IDLE_PERIODS:
                return
            self._evict(longest_unused.certificate)
        del self._young[cache_key]
        self._old[cache_key] = _Entry(certificate, period)
        self._old_bytes += certificate.size

    def _evict(self, certificate: VerifiedCertificate) -> None:
        cache_key, identity = certificate.cache_key, certificate.caller.identity
        if self._young.pop(cache_key, None) is None:
            del self._old[cache_key]
            self._old_bytes -= certificate.size
        self._bytes -= certificate.size
        own = self._by_identity[identity]
        del own[cache_key]
        if not own:
            del self._by_identity[identity]
