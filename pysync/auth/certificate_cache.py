"""A cache of verified certificates, by the headers that presented them."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from pysync._core import PublicKey
from pysync.model import Caller

MAX_BYTES: Final = 32 * 1024 * 1024
"""Bytes of the cache for callers whom the configuration trusts, and again for all others: some 8,000 callers
each."""
MAX_IDENTITY_BYTES: Final = 64 * 1024
"""The share of it that one identity may hold."""
BYTES_PER_CERTIFICATE: Final = 2_000
BYTES_PER_CHAR: Final = 3
"""The memory of a proof by the length of its header: the header itself, and the paths once more."""


@dataclass(frozen=True, slots=True)
class VerifiedCertificate:
    """A verified certificate with its presenter's key, and the caller that it makes. `not_in_audience`: the
    presenter is not in the audience that it names. `is_trusted`: the configuration names the identity or,
    unless anybody may present the certificate, the issuer."""

    iss: str
    iss_user_id: str
    sub: str
    nonce: str
    nbf: int
    exp: int
    key: PublicKey
    caller: Caller
    not_in_audience: bool
    is_trusted: bool
    cache_key: tuple[str, str]

    @property
    def size(self) -> int:
        return BYTES_PER_CERTIFICATE + BYTES_PER_CHAR * len(self.cache_key[0])


class CertificateCache:
    """Spares callers the check of their certificate. Strangers take no room from callers whom the
    configuration trusts, no identity takes more than its share, and the least recently used proof is evicted
    first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._trusted = _LruCache(max_bytes)
        self._others = _LruCache(max_bytes)

    def get(self, authorization: str, presenter: str) -> VerifiedCertificate | None:
        """The proof that was put for this header, by anybody or by this presenter."""
        return self._trusted.get((authorization, "")) or (
            self._others.get((authorization, ""))
            or (self._others.get((authorization, presenter)) if presenter else None)
        )

    def put(self, certificate: VerifiedCertificate) -> None:
        """Remember a proof, once a request under it was allowed."""
        (self._trusted if certificate.is_trusted else self._others).put(certificate)


class _LruCache:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, str], VerifiedCertificate] = OrderedDict()
        self._by_identity: dict[str, OrderedDict[tuple[str, str], VerifiedCertificate]] = {}

    def get(self, cache_key: tuple[str, str]) -> VerifiedCertificate | None:
        proof = self._entries.get(cache_key)
        if proof is not None:
            self._entries.move_to_end(cache_key)
        return proof

    def put(self, certificate: VerifiedCertificate) -> None:
        if certificate.cache_key in self._entries:
            return
        own = self._by_identity.setdefault(certificate.caller.identity, OrderedDict())
        self._entries[certificate.cache_key] = own[certificate.cache_key] = certificate
        self._bytes += certificate.size
        if len(own) > 1:
            held = sum(each.size for each in own.values())
            while held > MAX_IDENTITY_BYTES:
                oldest = next(iter(own.values()))
                held -= oldest.size
                self._evict(oldest)
        while self._bytes > self._max_bytes:
            self._evict(next(iter(self._entries.values())))

    def _evict(self, certificate: VerifiedCertificate) -> None:
        del self._entries[certificate.cache_key]
        self._bytes -= certificate.size
        own = self._by_identity[certificate.caller.identity]
        del own[certificate.cache_key]
        if not own:
            del self._by_identity[certificate.caller.identity]
