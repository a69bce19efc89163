"""Verification of request signatures, several at once (docs/reference/protocol.md#request-signature)."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Final

from pysync import _core
from pysync.coordinator import Nonce

MAX_BATCH: Final = 16
"""Signatures that are verified at once. More save little, and keep the first of them waiting for longer."""
SINGLY_AFTER_FAILURE: Final = 8
"""For each signature of a batch that failed, how many of the next are verified one by one. So wrong ones cost
at most a ninth more than if each were verified alone."""

RequestParts = tuple[_core.PublicKey, str, str, list[str], bytes, str, int, str]
"""The arguments of `_core.verify_request`."""
ProofParts = tuple[str, str, bytes, _core.PublicKey, str]
"""The arguments of `_core.verify_author`, with a key that is parsed."""
Outcome = bool | Exception | None
"""What became of a nonce (`Coordinator.record_nonces`), None if it was not recorded."""
RecordNonces = Callable[[Sequence[Nonce]], Sequence[bool | Exception] | None]

_UNVERIFIED: Final = False, None


class AuthorProof:
    """The author proof of a request's body: its tag, document key, canonical data, author's key (hex) and
    signature. `is_verified` becomes True if it was verified together with the signature of the request."""

    __slots__ = ("data", "document_key", "is_verified", "pubkey", "signature", "tag")

    def __init__(self, tag: str, document_key: str, data: bytes, pubkey: str, signature: str) -> None:
        self.tag = tag
        self.document_key = document_key
        self.data = data
        self.pubkey = pubkey
        self.signature = signature
        self.is_verified = False

    def parts(self, key: _core.PublicKey) -> ProofParts:
        """Return all parts, with the author's key as it was parsed before."""
        return self.tag, self.document_key, self.data, key, self.signature


_Waiting = tuple[RequestParts, Nonce | None, AuthorProof | None, "asyncio.Future[tuple[bool, Outcome]]"]


class SignatureBatch:
    """Verifies the signatures of requests that are handled in the same tick of the event loop at once, with
    the author proofs of their bodies. That takes about half as long as one by one. `others_follow` returns
    True if the loop is about to handle further requests in this tick; without them a request waits for
    nothing. `record_nonces` is that of the coordinator."""

    def __init__(self, others_follow: Callable[[], bool], record_nonces: RecordNonces) -> None:
        self._others_follow = others_follow
        self._record_nonces = record_nonces
        self._waiting: list[_Waiting] = []
        self._singly = 0

    async def verify(
        self, request: RequestParts, nonce: Nonce | None = None, proof: AuthorProof | None = None
    ) -> tuple[bool, Outcome]:
        """Return True if the signature of a request is valid. If it is, and other requests waited with this
        one, their nonces are recorded together, and the outcome of `nonce` is returned as well. So a request
        that may have its nonce recorded as soon as it is verified waits only once. `proof` is by the key of
        the request. It is left unverified if it, or a signature that waited with it, is wrong."""
        if self._singly > 0:
            self._singly -= 1
            return _core.verify_request(*request), None
        follow = self._others_follow()
        if not (follow or self._waiting or proof):
            return _core.verify_request(*request), None
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # Not all that follow have a signature.
            loop.call_soon(self._verify_waiting)
        verified: asyncio.Future[tuple[bool, Outcome]] = loop.create_future()
        self._waiting.append((request, nonce, proof, verified))
        if not follow or len(self._waiting) == MAX_BATCH:
            self._verify_waiting()
        verdict = await verified
        return verdict if verdict is not _UNVERIFIED else (_core.verify_request(*request), None)

    def _verify_waiting(self) -> None:
        """Verify what waits. If one signature is wrong, each request verifies its own."""
        waiting, self._waiting = self._waiting, []
        verdicts: Iterable[tuple[bool, Outcome]] = repeat(_UNVERIFIED)
        try:
            proofs = [(proof, request[0]) for request, _, proof, _ in waiting if proof is not None]
            if len(waiting) + len(proofs) > 1:
                requests = [request for request, _, _, _ in waiting]
                if _core.verify_requests(requests, [proof.parts(key) for proof, key in proofs]):
                    for proof, _ in proofs:
                        proof.is_verified = True
                    verdicts = [(True, outcome) for outcome in self._record(waiting)]
                else:
                    self._singly = SINGLY_AFTER_FAILURE * (len(waiting) + len(proofs))
        finally:
            for (_, _, _, verified), verdict in zip(waiting, verdicts, strict=False):
                if not verified.done():
                    verified.set_result(verdict)

    def _record(self, waiting: list[_Waiting]) -> Iterable[Outcome]:
        """Record the nonces of requests that wait, and return what became of each."""
        nonces = [None if verified.done() else nonce for _, nonce, _, verified in waiting]
        given = [nonce for nonce in nonces if nonce is not None]
        recorded = self._record_nonces(given) if given else None
        if recorded is None or len(given) == len(nonces):
            return recorded or repeat(None, len(nonces))
        outcomes = iter(recorded)
        return [None if nonce is None else next(outcomes) for nonce in nonces]
