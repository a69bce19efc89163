"""Signatures of requests: one by one and several at once, the same are accepted."""

import base64
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import edwards
from support.edwards import BASE, IDENTITY, TORSION, Point, add, encode, multiply

import pysync._core as core
from pysync.auth.signature_batch import RequestParts

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


@st.composite
def requests(draw: st.DrawFn) -> tuple[RequestParts, bool]:
    """A request and whether it is signed: honestly, with points of small order, or not quite."""
    signer = Signer(draw(st.sampled_from([1, 2, 2**200 + 7])), draw(st.sampled_from(TORSION)))
    nonce = draw(st.sampled_from("abcdef"))
    r = draw(st.sampled_from([0, 1, 2**251]) | st.integers(0, edwards.L - 1))
    signed = draw(st.sampled_from([nonce, nonce, nonce, "other"]))
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
    return parts(signer.key, signature, nonce), edwards.is_signature(signer.key, message(nonce), signature)


@given(st.lists(requests(), min_size=1, max_size=5))
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
    # Signatures that others verify as well are compared without the factor 8, as OpenSSL does.
    k = edwards.challenge(signature[:32], signer.key, message("n"))
    residue = (k * of_key + of_r) % 8
    assert request[0].verify(message("n"), request[1]) == (residue == 0)


@pytest.mark.parametrize("r_bytes", MALLEATED_IDENTITIES)
def test_another_encoding_of_r_is_refused_alone_and_together(r_bytes: bytes) -> None:
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
def test_texts_that_are_not_utf8_are_refused(at: int) -> None:
    request: list[Any] = list(honest(1)[0])
    request[at] = "\udcff"
    refused: Any = tuple(request)
    assert not core.verify_requests([refused, *honest(1)])


def test_nothing_is_signed_by_nobody() -> None:
    assert core.verify_requests([])
