"""Signatures of requests and author proofs: one by one and several at once, the same are accepted."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import edwards, reference
from support.edwards import BASE, IDENTITY, TORSION, Point, add, encode, multiply

import pysync._core as core
from pysync.auth.authentication import ProofParts, RequestParts

MALLEATED_IDENTITIES = [
    (1 | 1 << 255).to_bytes(32, "little"),  # an x of -0
    (edwards.P + 1).to_bytes(32, "little"),  # a y that is not reduced
    (edwards.P + 1 | 1 << 255).to_bytes(32, "little"),
]


@dataclass
class Signer:
    """Signs with a secret of their own, and may add points of small order wherever they like."""

    secret: int
    torsion: Point = IDENTITY

    @property
    def key(self) -> bytes:
        return encode(add(multiply(self.secret, BASE), self.torsion))

    def sign(
        self, message: bytes, r: int, r_torsion: Point = IDENTITY, r_bytes: bytes | None = None
    ) -> bytes:
        sent = r_bytes or encode(add(multiply(r, BASE), r_torsion))
        s = (r + edwards.challenge(sent, self.key, message) * self.secret) % edwards.L
        return sent + s.to_bytes(32, "little")


def parts(key: bytes, signature: bytes, nonce: str) -> RequestParts:
    text = base64.b64encode(signature).decode()
    return core.PublicKey(key.hex()), text, "GET", ["/pull/a"], b"", "h", 1_700_000_000_000, nonce


def message(nonce: str) -> bytes:
    return core.request_message("GET", "/pull/a", b"", "h", 1_700_000_000_000, nonce)


def honest(count: int) -> list[RequestParts]:
    signers = [Signer(1000 + n % 3) for n in range(count)]
    return [
        parts(signer.key, signer.sign(message(f"n{n}"), 77 + n), f"n{n}") for n, signer in enumerate(signers)
    ]


Signed = tuple[bytes, str, bytes, bool]
"""A key, a text, a signature, and whether it is one of the key for the message of the text."""


@st.composite
def signatures(draw: st.DrawFn, message: Callable[[str], bytes]) -> Signed:
    """A signature: honest, with points of small order, or not quite one."""
    signer = Signer(draw(st.sampled_from([1, 2, 2**200 + 7])), draw(st.sampled_from(TORSION)))
    text = draw(st.sampled_from("abcdef"))
    r = draw(st.sampled_from([0, 1, 2**251]) | st.integers(0, edwards.L - 1))
    signed = draw(st.sampled_from([text, text, text, "other"]))
    signature = signer.sign(message(signed), r, draw(st.sampled_from(TORSION)))
    match draw(st.sampled_from(["", "", "", "", "s + L", "flip", "malleate"])):
        case "s + L":
            s = int.from_bytes(signature[32:], "little") + edwards.L
            signature = signature[:32] + s.to_bytes(32, "little")
        case "flip":
            flipped = int.from_bytes(signature, "little") ^ 1 << draw(st.integers(0, 511))
            signature = flipped.to_bytes(64, "little")
        case "malleate":
            signature = signer.sign(message(signed), 0, r_bytes=draw(st.sampled_from(MALLEATED_IDENTITIES)))
    return signer.key, text, signature, edwards.is_signature(signer.key, message(text), signature)


def signed_request(signed: Signed) -> tuple[RequestParts, bool]:
    key, nonce, signature, is_signed = signed
    return parts(key, signature, nonce), is_signed


def author_message(text: str) -> bytes:
    return reference.author_message("tag", f"notes/{text}", {"d": text})


def proof_parts(key: bytes, signature: bytes, text: str) -> ProofParts:
    data = reference.canonical({"d": text}).encode()
    return "tag", f"notes/{text}", data, core.PublicKey(key.hex()), base64.b64encode(signature).decode()


def author_proof(signed: Signed) -> tuple[ProofParts, bool]:
    key, text, signature, is_signed = signed
    return proof_parts(key, signature, text), is_signed


def verify_author(proof: ProofParts) -> bool:
    tag, document_key, data, key, signature = proof
    return core.verify_author(tag, document_key, data, key.hex, signature)


requests = signatures(message).map(signed_request)
proofs = signatures(author_message).map(author_proof)


@given(st.lists(proofs, min_size=1, max_size=4), st.lists(requests, max_size=3))
def test_proofs_are_accepted_with_requests_if_and_only_if_each_is_alone(
    cases: list[tuple[ProofParts, bool]], others: list[tuple[RequestParts, bool]]
) -> None:
    for proof, is_signed in cases:
        assert verify_author(proof) == is_signed
        assert core.verify_requests([], [proof]) == is_signed
        assert core.verify_requests(honest(2), [proof, proof]) == is_signed
    given_requests, given_proofs = [request for request, _ in others], [proof for proof, _ in cases]
    are_all = all(is_signed for _, is_signed in [*cases, *others])
    assert core.verify_requests(given_requests, given_proofs) == are_all
    assert core.verify_requests(
        [request for request, is_signed in others if is_signed],
        [proof for proof, is_signed in cases if is_signed],
    )


@pytest.mark.parametrize("of_key", range(8))
@pytest.mark.parametrize("of_r", range(8))
def test_points_of_small_order_are_ignored_in_a_proof_alone_and_among_requests(
    of_key: int, of_r: int
) -> None:
    signer = Signer(12345, TORSION[of_key])
    proof = proof_parts(signer.key, signer.sign(author_message("a"), 67890, TORSION[of_r]), "a")
    assert verify_author(proof)
    assert core.verify_requests(honest(3), [proof])


@pytest.mark.parametrize("at", [0, 1, 4])
def test_texts_of_a_proof_that_are_not_utf8_are_rejected(at: int) -> None:
    signer = Signer(7)
    proof: list[Any] = [*proof_parts(signer.key, signer.sign(author_message("a"), 9), "a")]
    proof[at] = "\udcff"
    rejected: Any = tuple(proof)
    assert not core.verify_requests(honest(2), [rejected])


def test_a_request_and_a_proof_whose_errors_cancel_out_are_found() -> None:
    signer = Signer(5)

    def forged(message: bytes, error: int) -> bytes:
        signature = signer.sign(message, 9)
        s = (int.from_bytes(signature[32:], "little") + error) % edwards.L
        return signature[:32] + s.to_bytes(32, "little")

    request = parts(signer.key, forged(message("a"), 1), "a")
    proof = proof_parts(signer.key, forged(author_message("a"), -1), "a")
    assert not core.verify_requests([request], [proof])


@given(st.lists(requests, min_size=1, max_size=5))
def test_requests_are_accepted_together_if_and_only_if_each_is_alone(
    cases: list[tuple[RequestParts, bool]],
) -> None:
    for request, is_signed in cases:
        assert core.verify_request(*request) == is_signed
        assert core.verify_requests([request]) == is_signed
        assert core.verify_requests([request, *honest(2), request]) == is_signed
    assert core.verify_requests([request for request, _ in cases]) == all(signed for _, signed in cases)
    assert core.verify_requests([request for request, signed in cases if signed])


@pytest.mark.parametrize("of_key", range(8))
@pytest.mark.parametrize("of_r", range(8))
def test_points_of_small_order_are_ignored_alone_and_together(of_key: int, of_r: int) -> None:
    signer = Signer(12345, TORSION[of_key])
    signature = signer.sign(message("n"), 67890, TORSION[of_r])
    request = parts(signer.key, signature, "n")
    assert core.verify_request(*request)
    assert core.verify_requests([request, *honest(3)])
    # Certificates and revocation lists are compared without the factor 8, as OpenSSL does.
    k = edwards.challenge(signature[:32], signer.key, message("n"))
    residue = (k * of_key + of_r) % 8
    assert request[0].verify(message("n"), request[1]) == (residue == 0)


@pytest.mark.parametrize("r_bytes", MALLEATED_IDENTITIES)
def test_another_encoding_of_r_is_rejected_alone_and_together(r_bytes: bytes) -> None:
    signer = Signer(5)
    assert core.verify_request(*parts(signer.key, signer.sign(message("n"), 0), "n"))
    request = parts(signer.key, signer.sign(message("n"), 0, r_bytes=r_bytes), "n")
    assert not core.verify_request(*request)
    assert not core.verify_requests([request, *honest(2)])


@pytest.mark.parametrize("is_one_key", [False, True])
def test_errors_that_cancel_out_are_found(is_one_key: bool) -> None:
    signers = [Signer(5), Signer(5 if is_one_key else 6)]
    forged = []
    for signer, error, nonce in zip(signers, [1, -1], "ab", strict=True):
        signature = signer.sign(message(nonce), 9)
        s = (int.from_bytes(signature[32:], "little") + error) % edwards.L
        forged.append(parts(signer.key, signature[:32] + s.to_bytes(32, "little"), nonce))
    assert not any(core.verify_request(*request) for request in forged)
    assert not core.verify_requests(forged)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 63, 64, 65, 200])
def test_one_wrong_signature_among_many_is_found_wherever_it_is(count: int) -> None:
    good = honest(count)
    assert core.verify_requests(good)
    for at in {0, count // 2, count - 1}:
        _, other, *_ = honest(count + 1)[count]
        forged: Any = good[at][0], other, *good[at][2:]
        assert not core.verify_requests([*good[:at], forged, *good[at + 1 :]])


def test_only_the_first_target_counts_together() -> None:
    key, signature, method, targets, *rest = honest(1)[0]
    second: Any = key, signature, method, ["/v1/pull/a", *targets], *rest
    assert core.verify_request(*second)
    assert not core.verify_requests([second])
    without: Any = key, signature, method, [], *rest
    assert not core.verify_requests([without])


@pytest.mark.parametrize("at", [1, 2, 5, 7])
def test_texts_that_are_not_utf8_are_rejected(at: int) -> None:
    request: list[Any] = list(honest(1)[0])
    request[at] = "\udcff"
    rejected: Any = tuple(request)
    assert not core.verify_requests([rejected, *honest(1)])


def test_nothing_is_signed_by_nobody() -> None:
    assert core.verify_requests([])
