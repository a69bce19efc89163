"""Which signatures wait for others, for how long, and what wrong ones cost."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clients import ISSUER, SUBJECT

from pysync import _core
from pysync.auth.authentication import (
    MAX_BATCH,
    AuthorProof,
    ProofParts,
    RequestParts,
    SignatureBatch,
)
from pysync.auth.signing import DOCUMENT_AUTHOR, sign_author


def request(nonce: int, *, is_signed: bool = True) -> RequestParts:
    signer = (ISSUER, SUBJECT)[nonce % 2]
    signed = ("GET", "/pull/a", b"", "h", 1_700_000_000_000, str(nonce))
    signature = signer.sign(_core.request_message(*signed) if is_signed else b"something else")
    method, target, *rest = signed
    return _core.PublicKey(signer.ed_pub), signature, method, [target], *rest  # type: ignore[return-value]


def author_proof(number: int, *, is_signed: bool = True) -> AuthorProof:
    """A proof by the signer of `request(number)`."""
    signer = (ISSUER, SUBJECT)[number % 2]
    signature = sign_author(signer, DOCUMENT_AUTHOR, "notes/a", b"{}" if is_signed else b"[]")
    return AuthorProof(DOCUMENT_AUTHOR, "notes/a", b"{}", signer.ed_pub, signature["authorSignature"])


class Checks:
    """Counts signatures that are verified one by one, and those that are verified together."""

    def __init__(self) -> None:
        self.singly = 0
        self.together: list[int] = []

    def verify_one(self, *parts: Any) -> bool:
        self.singly += 1
        return _core.verify_request(*parts)

    def verify_together(self, requests: list[RequestParts], proofs: list[ProofParts]) -> bool:
        self.together.append(len(requests) + len(proofs))
        return _core.verify_requests(requests, proofs)

    @property
    def total(self) -> int:
        return self.singly + sum(self.together)


class Turn:
    """The requests that the event loop handles in one turn."""

    def __init__(self, checks: Checks | None = None) -> None:
        checks = checks or Checks()
        self.following = 0
        self.batch = SignatureBatch(lambda: self.following > 0, checks.verify_one, checks.verify_together)

    async def handle(self, requests: list[RequestParts]) -> list[bool]:
        """Whether each of these is signed."""
        self.following = len(requests)
        return await asyncio.gather(*map(self.verify_one, requests))

    async def verify_one(self, request: RequestParts, proof: AuthorProof | None = None) -> bool:
        self.following -= 1
        return await self.batch.verify(request, proof)


@pytest.fixture
def checks() -> Checks:
    return Checks()


def result_at_once(coroutine: Coroutine[Any, Any, bool]) -> bool:
    """Whether a request is signed, by a coroutine that does not give the event loop a turn."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return bool(ended.value)
    coroutine.close()
    raise AssertionError("it waits")


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_lone_request_waits_for_nothing(checks: Checks, is_signed: bool) -> None:
    turn = Turn(checks)
    assert result_at_once(turn.batch.verify(request(1, is_signed=is_signed))) == is_signed
    assert (checks.singly, checks.together) == (1, [])


async def test_requests_of_one_tick_are_verified_together(checks: Checks) -> None:
    assert await Turn(checks).handle([request(n) for n in range(5)]) == [True] * 5
    assert (checks.singly, checks.together) == (0, [5])


async def test_the_last_request_of_a_tick_waits_for_nothing(checks: Checks) -> None:
    turn = Turn(checks)
    turn.following = 2
    first = asyncio.create_task(turn.verify_one(request(1)))
    await asyncio.sleep(0)
    turn.following -= 1
    assert result_at_once(turn.batch.verify(request(2)))
    assert checks.together == [2]
    assert await first


async def test_request_waits_one_tick_if_those_that_follow_have_no_signature(checks: Checks) -> None:
    turn = Turn(checks)
    turn.following = 3
    task = asyncio.create_task(turn.batch.verify(request(1)))
    await asyncio.sleep(0)  # it waits
    assert not task.done()
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert task.result()
    assert turns <= 2, "the turn in which it is verified, and the one in which it goes on"
    assert (checks.singly, checks.together) == (1, [])


async def test_no_more_than_a_batch_is_verified_at_once(checks: Checks) -> None:
    assert all(await Turn(checks).handle([request(n) for n in range(2 * MAX_BATCH + 3)]))
    assert checks.together == [MAX_BATCH, MAX_BATCH, 3]


async def test_a_wrong_signature_rejects_only_itself(checks: Checks) -> None:
    requests = [request(n, is_signed=n != 3) for n in range(8)]
    assert await Turn(checks).handle(requests) == [n != 3 for n in range(8)]
    assert (checks.singly, checks.together) == (8, [8])


async def test_a_request_that_is_given_up_leaves_the_others(checks: Checks) -> None:
    turn = Turn(checks)
    turn.following = 3
    tasks = [asyncio.create_task(turn.batch.verify(request(n))) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    turn.following = 0
    assert all(await asyncio.gather(tasks[0], tasks[2]))


async def test_author_proofs_are_verified_with_the_requests_that_carry_them(checks: Checks) -> None:
    turn, proofs = Turn(checks), [author_proof(0), author_proof(2)]
    turn.following = 3
    each = [turn.verify_one(request(n), proof) for n, proof in ((0, proofs[0]), (1, None), (2, proofs[1]))]
    assert await asyncio.gather(*each) == [True] * 3
    assert all(proof.is_verified for proof in proofs)
    assert (checks.singly, checks.together) == (0, [5])


def test_a_lone_request_with_an_author_proof_waits_for_nothing(checks: Checks) -> None:
    async def lone() -> None:
        turn, proof = Turn(checks), author_proof(1)
        assert await turn.batch.verify(request(1), proof)
        assert proof.is_verified

    asyncio.run(lone())
    assert (checks.singly, checks.together) == (0, [2])


async def test_a_wrong_author_proof_is_left_unverified(checks: Checks) -> None:
    turn, proofs = Turn(checks), [author_proof(n, is_signed=n != 1) for n in range(3)]
    turn.following = 3
    each = [turn.verify_one(request(n), proof) for n, proof in enumerate(proofs)]
    assert await asyncio.gather(*each) == [True] * 3
    assert not any(proof.is_verified for proof in proofs), "each verifies its own"
    assert (checks.singly, checks.together) == (3, [6])
    for n in range(48):
        assert await turn.verify_one(request(n), author_proof(n))
    assert checks.together == [6], "the next 48 are verified one by one"


async def test_the_author_proof_of_a_wrong_request_is_left_unverified() -> None:
    turn, proof = Turn(), author_proof(1)
    assert not await turn.verify_one(request(1, is_signed=False), proof)
    assert not proof.is_verified


async def test_others_go_on_if_a_batch_cannot_be_verified() -> None:
    class Failing(Checks):
        def verify_together(self, requests: list[RequestParts], proofs: list[ProofParts]) -> bool:
            raise MemoryError

    turn = Turn(Failing())
    turn.following = 3
    tasks = [asyncio.create_task(turn.verify_one(request(n))) for n in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:2] == [True, True]
    assert isinstance(results[2], MemoryError)


async def test_batches_come_back_after_wrong_signatures(checks: Checks) -> None:
    turn = Turn(checks)
    assert await turn.handle([request(n, is_signed=False) for n in range(4)]) == [False] * 4
    for _ in range(8):
        assert all(await turn.handle([request(n) for n in range(4)]))
    assert checks.together == [4], "the next 32 are verified one by one"
    assert all(await turn.handle([request(n) for n in range(4)]))
    assert checks.together == [4, 4]


@given(
    st.lists(
        st.lists(st.sampled_from([True, False, False]), min_size=1, max_size=MAX_BATCH + 2),
        min_size=1,
        max_size=12,
    )
)
def test_a_flood_of_wrong_signatures_costs_little_more_than_without_batches(
    turns: list[list[bool]],
) -> None:
    """Even if a signature of a batch cost as much as one alone; it takes half as long."""
    checks = Checks()
    turn, handled = Turn(checks), sum(map(len, turns))

    async def flood() -> None:
        for signed in turns:
            requests = [request(n, is_signed=each) for n, each in enumerate(signed)]
            assert await turn.handle(requests) == signed

    asyncio.run(flood())
    # The last batch that failed is not paid off yet.
    assert checks.total <= 10 / 9 * handled + MAX_BATCH


async def test_a_long_flood_costs_at_most_a_ninth_more_checks(checks: Checks) -> None:
    turn = Turn(checks)
    forged = [request(n, is_signed=False) for n in range(MAX_BATCH)]
    for _ in range(45):
        assert not any(await turn.handle(forged))
    assert checks.total == 50 * MAX_BATCH
