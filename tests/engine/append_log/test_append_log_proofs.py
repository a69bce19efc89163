"""Author proofs and repeated appends of logs, black box over HTTP, as `test_append_log_protocol.py`."""

import asyncio
import os
from typing import Any

import orjson
import pytest
from support.append_log_browser import Unique, append, elements, proof
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed

from pysync.auth import signing

# Author proofs (docs/reference/protocol.md#author-proofs)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"authorPubkey": ISSUER.ed_pub},
        {"authorSignature": "x"},
        {"authorPubkey": ISSUER.ed_pub, "authorSignature": 1},
        {"authorPubkey": None, "authorSignature": "x"},
        {"authorPubkey": [ISSUER.ed_pub], "authorSignature": "x"},
    ],
)
async def test_a_log_takes_no_element_without_an_author_proof(
    anyone: Browser, unique: Unique, members: dict[str, Any]
) -> None:
    key = unique("authored")
    rejected = await append(anyone, key, {}, **members)
    assert rejected.error == (400, "append requires authorPubkey and authorSignature")
    assert await elements(anyone, key) == []


async def test_an_author_proof_is_checked_kept_and_returned(anyone: Browser, unique: Unique) -> None:
    key, data = unique("authored"), {"b": 9007199254740993, "a": "é"}
    proved = proof(STRANGER, key, data)
    assert (await append(anyone, key, data, **proved)).status == 200
    (element,) = await elements(anyone, key)
    assert element == {"ts": element["ts"], "data": data, **proved}
    invalid = (403, "invalid append author signature")
    of_document = signing.sign_author(STRANGER, signing.DOCUMENT_AUTHOR, key, orjson.dumps(data))
    for wrong in (
        proof(STRANGER, key + "x", data),
        proof(STRANGER, key, {**data, "a": "e"}),
        of_document,
        {**proved, "authorPubkey": SUBJECT.ed_pub},
        {**proved, "authorPubkey": "", "authorSignature": ""},
        {**proved, "authorPubkey": "zz" * 32},
        {**proved, "authorSignature": proved["authorSignature"].rstrip("=")},
    ):
        assert (await append(anyone, key, data, **wrong)).error == invalid
    assert len(await elements(anyone, key)) == 1


async def test_an_author_signs_what_is_stored(anyone: Browser, unique: Unique) -> None:
    key = unique("authored")
    assert (await append(anyone, key, {"n": 1, "__proto__": 2}, **proof(ISSUER, key, {"n": 1}))).status == 200
    rejected = await append(anyone, key, {"n": 1, "__proto__": 2}, **proof(ISSUER, key, {"n": 2}))
    assert rejected.status == 403


async def test_an_author_proof_does_not_cover_the_time(anyone: Browser, unique: Unique) -> None:
    key = unique("authored")
    proved = proof(ISSUER, key, {})
    for ts in (5, 6):
        assert (await append(anyone, key, {}, ts=ts, **proved)).status == 200


async def test_the_author_is_the_presenter_of_a_signed_request(member: Signed, unique: Unique) -> None:
    key = f"{unique('rooms')}/messages"
    assert (await append(member, key, {"n": 1}, **proof(SUBJECT, key, {"n": 1}))).status == 200
    for other, data in ((ISSUER, {"n": 1}), (ISSUER, {"n": 2})):
        rejected = await append(member, key, {"n": 1}, **proof(other, key, data))
        assert rejected.error == (403, "append author must be the request presenter")
    shouted = {**proof(SUBJECT, key, {"n": 1}), "authorPubkey": SUBJECT.ed_pub.upper()}
    rejected = await append(member, key, {"n": 1}, **shouted)
    assert rejected.error == (403, "append author must be the request presenter"), "compared as text"
    wrong = await append(member, key, {"n": 2}, **proof(SUBJECT, key, {"n": 1}))
    assert wrong.error == (403, "invalid append author signature")
    assert len(await elements(member, key)) == 1


async def test_without_required_proofs_nothing_is_verified_and_both_members_are_kept(
    anyone: Browser, owner: Signed, unique: Unique
) -> None:
    key, garbage = unique("log"), {"authorPubkey": "not a key", "authorSignature": ""}
    assert (await append(anyone, key, {}, **garbage)).status == 200
    for one in (
        {"authorPubkey": "only"},
        {"authorSignature": "only"},
        {"authorPubkey": "one", "authorSignature": 5},
        {"authorPubkey": {}, "authorSignature": "one"},
    ):
        assert (await append(anyone, key, {}, **one)).status == 200
    first, *others = await elements(anyone, key)
    assert {name: first[name] for name in garbage} == garbage
    assert [set(each) for each in others] == [{"ts", "data"}] * 4
    mine = f"diary/{ISSUER.user_id}/{os.urandom(4).hex()}"
    assert (await append(owner, mine, {}, **garbage)).status == 200, "nor is it bound to the presenter"


# Idempotency


async def test_a_repeated_append_is_answered_again_and_not_appended(anyone: Browser, unique: Unique) -> None:
    key, once = unique("log"), {"Idempotency-Key": os.urandom(8).hex()}
    first = await append(anyone, key, {"n": 1}, once)
    await append(anyone, key, {"n": 2})
    again = await append(anyone, key, {"n": 1}, once)
    assert (again.status, again.json) == (200, first.json)
    assert [each["data"]["n"] for each in await elements(anyone, key)] == [1, 2]
    other = await append(anyone, key, {"n": 1}, {"Idempotency-Key": "another"})
    assert other.json["timestamp"] > first.json["timestamp"]
    assert (await append(anyone, key, {"n": 1})).status == 200, "without a key each one counts"
    assert len(await elements(anyone, key)) == 4


async def test_an_append_that_is_sent_many_times_at_once_is_appended_once(
    anyone: Browser, unique: Unique
) -> None:
    key, once = unique("log"), {"Idempotency-Key": os.urandom(8).hex()}
    answers = await asyncio.gather(*(append(anyone, key, {"n": 1}, once) for _ in range(12)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len(await elements(anyone, key)) == 1


async def test_an_idempotency_key_belongs_to_one_log_and_one_caller(
    anyone: Browser, member: Signed, owner: Signed, unique: Unique
) -> None:
    once = {"Idempotency-Key": os.urandom(8).hex()}
    for key in (unique("log"), unique("log") + "x", unique("entries")):
        assert (await append(anyone, key, {"n": 1}, once)).status == 200
    key = f"{unique('rooms')}/messages"
    for caller, keys in ((member, SUBJECT), (owner, ISSUER)):
        assert (await append(caller, key, {}, once, **proof(keys, key, {}))).status == 200
    assert len(await elements(member, key)) == 2


@pytest.mark.parametrize("bad", ["", "x" * 129, "tab\there"])
async def test_an_unusable_idempotency_key_is_rejected(anyone: Browser, unique: Unique, bad: str) -> None:
    key = unique("log")
    assert (await append(anyone, key, {}, {"Idempotency-Key": bad})).json["code"] == "bad_request"
    assert await elements(anyone, key) == []
