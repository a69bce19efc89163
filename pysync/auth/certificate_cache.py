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
BYTES_PER_PROOF: Final = 2_000
BYTES_PER_CHAR: Final = 3
"""The memory of a proof by the length of its header: the header itself, and the paths once more."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A verified certificate with its presenter's key, and the caller that it makes. `excluded`: the
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
    excluded: bool
    is_trusted: bool
    known_as: tuple[str, str]

    @property
    def size(self) -> int:
        return BYTES_PER_PROOF + BYTES_PER_CHAR * len(self.known_as[0])


class ProofCache:
    """Spares callers the check of their certificate. Strangers take no room from callers whom the
    configuration trusts, no identity takes more than its share, and the least recently used proof is evicted
    first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._trusted = _Shelf(max_bytes)
        self._others = _Shelf(max_bytes)

    def get(self, authorization: str, presenter: str) -> Proof | None:
        """The proof that was put for this header, by anybody or by this presenter."""
        return self._trusted.get((authorization, "")) or (
            self._others.get((authorization, ""))
            or (self._others.get((authorization, presenter)) if presenter else None)
        )

    def put(self, proof: Proof) -> None:
        """Remember a proof, once a request under it was allowed."""
        (self._trusted if proof.is_trusted else self._others).put(proof)


class _Shelf:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._proofs: OrderedDict[tuple[str, str], Proof] = OrderedDict()
        self._by_identity: dict[str, OrderedDict[tuple[str, str], Proof]] = {}

    def get(self, known_as: tuple[str, str]) -> Proof | None:
        proof = self._proofs.get(known_as)
        if proof is not None:
            self._proofs.move_to_end(known_as)
        return proof

    def put(self, proof: Proof) -> None:
        if proof.known_as in self._proofs:
            return
        own = self._by_identity.setdefault(proof.caller.identity, OrderedDict())
        self._proofs[proof.known_as] = own[proof.known_as] = proof
        self._bytes += proof.size
        if len(own) > 1:
            held = sum(each.size for each in own.values())
            while held > MAX_IDENTITY_BYTES:
                oldest = next(iter(own.values()))
                held -= oldest.size
                self._drop(oldest)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._proofs.values())))

    def _drop(self, proof: Proof) -> None:
        del self._proofs[proof.known_as]
        self._bytes -= proof.size
        own = self._by_identity[proof.caller.identity]
        del own[proof.known_as]
        if not own:
            del self._by_identity[proof.caller.identity]
