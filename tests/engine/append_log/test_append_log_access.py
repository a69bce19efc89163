"""Who may do what with logs, and what is kept of them: black box, as `test_append_log_protocol.py`."""

import gzip
import hashlib
import os

from support.append_log_browser import Unique, append, elements, proof, tail
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, minted_at, root_device
from support.reference import canonical

from pysync.auth import issuing
from pysync.clock import wall_clock_ms

# What is not kept, listed, restricted


async def test_element_that_is_not_persisted_is_answered_and_forgotten(
    anyone: Browser, unique: Unique
) -> None:
    key, data = unique("signals"), {"b": 1, "a": 2}
    sent = await append(anyone, key, data)
    assert sent.status == 200
    assert sent.json["hash"] == hashlib.sha256(canonical(data).encode()).hexdigest()
    ahead = wall_clock_ms() + 100_000
    assert (await append(anyone, key, data, ts=ahead)).json["timestamp"] == ahead
    assert (await append(anyone, key, data, ts=1)).json["timestamp"] == 1, "there is no last one"
    rejected = await append(anyone, key, data, ts=wall_clock_ms() + 400_000)
    assert rejected.error == (400, "ts is too far in the future")
    for query in ("", "full=true", "last=3", "checkpoint=0&full=true"):
        pulled = await tail(anyone, key, query)
        assert (pulled.status, pulled.json["data"], pulled.json["hash"]) == (200, {"items": []}, "")
        assert "ETag" not in pulled.headers


async def test_logs_are_listed_by_name(anyone: Browser) -> None:
    suffix = os.urandom(6).hex()
    for name in ("b", "a", "c"):
        await append(anyone, f"log/{suffix}-{name}", {"text": "x" * 1000})
    page = await anyone.request("GET", f"/list/log?limit=3&after={suffix}")
    assert page.json["items"] == [f"{suffix}-a", f"{suffix}-b", f"{suffix}-c"]


async def test_a_log_that_is_only_pushed_has_no_pull(anyone: Browser, unique: Unique) -> None:
    key = unique("letterbox")
    assert (await append(anyone, key, {})).status == 200
    assert (await tail(anyone, key)).status == 404


async def test_a_namespace_is_a_prefix_over_the_same_logs(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    for prefix in ("", "/acme", "/v1/acme"):
        assert (await anyone.request("POST", f"{prefix}/push/{key}", {"data": {}})).status == 200
    for prefix in ("", "/acme", "/v1/acme"):
        pulled = await anyone.request("GET", f"{prefix}/pull/{key}?full=true")
        assert len(pulled.json["data"]["items"]) == 3


async def test_wrong_methods_and_paths_are_rejected_as_for_documents(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    answer = await anyone.request("POST", f"/pull/{key}", {"data": {}})
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert (await anyone.request("GET", f"/push/{key}")).status == 405
    assert (await append(anyone, "log/a%2Fb", {})).error == (400, "Invalid path parameter")
    assert (await tail(anyone, "log/..")).error == (400, "Invalid path parameter")


async def test_callers_need_roles_and_operations(
    anyone: Browser, member: Signed, untrusted: Signed, unique: Unique
) -> None:
    key = f"{unique('rooms')}/messages"
    for nobody in (await append(anyone, key, {}), await tail(anyone, key, "last=1")):
        assert nobody.error == (401, "Unauthorized")
    for other in (
        await append(untrusted, key, {}, **proof(STRANGER, key, {})),
        await tail(untrusted, key, "last=1"),
    ):
        assert other.error == (403, "Forbidden")
    assert (await tail(anyone, key, "last=x")).status == 401, "who asks is told first"
    member.certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", **minted_at()
    )
    assert (await tail(member, key, "last=1")).status == 200
    assert (await append(member, key, {}, **proof(SUBJECT, key, {}))).error == (403, "Forbidden")


async def test_an_identity_owns_its_logs(owner: Signed, untrusted: Signed, anyone: Browser) -> None:
    key = f"diary/{ISSUER.user_id}/{os.urandom(4).hex()}"
    assert (await append(owner, key, {"n": 1})).status == 200
    assert len(await elements(owner, key)) == 1
    assert (await append(untrusted, key, {})).error == (403, "Forbidden")
    assert (await tail(untrusted, key)).error == (403, "Forbidden")
    admin = {"Authorization": "Bearer protocol-admin-token"}
    assert (await append(anyone, key, {}, admin)).status == 200
    assert (await tail(anyone, key, "full=true", admin)).error == (403, "Forbidden")


async def test_a_signature_covers_the_query_and_the_body(owner: Signed, anyone: Browser) -> None:
    key = f"diary/{ISSUER.user_id}/{os.urandom(4).hex()}"
    signed = owner.headers("GET", f"/pull/{key}?last=1", b"")
    assert (await tail(anyone, key, "last=2", signed)).status == 401
    assert (await tail(anyone, key, "last=1", signed)).status == 200
    signed = owner.headers("POST", f"/push/{key}", b'{"data":{"n":1}}')
    assert (await anyone.request("POST", f"/push/{key}", b'{"data":{"n":2}}', signed)).status == 401
    zipped = gzip.compress(b'{"data":{"n":1}}')
    headers = {**signed, "Content-Encoding": "gzip"}
    assert (await anyone.request("POST", f"/push/{key}", zipped, headers)).status == 200
    assert (await anyone.request("POST", f"/push/{key}", zipped, headers)).status == 401, "a replay"
    assert len(await elements(owner, key)) == 1


# Schemas and permissions


async def test_data_must_satisfy_the_schema(anyone: Browser, unique: Unique) -> None:
    key = unique("ages")
    rejected = await append(anyone, key, {"age": -1})
    assert rejected.status == 400
    assert rejected.json["error"].startswith("Schema validation failed: ")
    assert (rejected.json["path"], rejected.json["validator"]) == ("/age", "minimum")
    assert (await append(anyone, key, {})).json["validator"] == "required"
    assert (await append(anyone, key, {"age": 3})).status == 200
    assert len(await elements(anyone, key)) == 1


async def test_members_are_hidden_from_and_locked_to_others(
    anyone: Browser, base: str, unique: Unique
) -> None:
    editor = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    key, large = unique("salaries"), 9007199254740993
    assert (await append(editor, key, {"name": "Ann", "salary": 10, "rank": large})).status == 200
    for data, name in (
        ({"salary": 10}, "salary"),
        ({"rank": None}, "rank"),
        ({"rank": 1, "salary": 1}, "rank"),
    ):
        rejected = await append(anyone, key, data)
        assert rejected.error == (403, f'Forbidden: field "{name}" requires roles: editor')
    extra = {"authorPubkey": "a", "authorSignature": "b"}
    last = await append(anyone, key, {"name": "Bea", "nested": {"salary": 1}}, **extra)
    assert last.status == 200

    whole, seen = await tail(editor, key), await tail(anyone, key)
    assert [each["data"] for each in whole.json["data"]["items"]] == [
        {"name": "Ann", "salary": 10, "rank": large},
        {"name": "Bea", "nested": {"salary": 1}},
    ]
    first, second = seen.json["data"]["items"]
    assert first == {"ts": first["ts"], "data": {"name": "Ann", "rank": large}}
    assert second == {"ts": last.json["timestamp"], "data": {"name": "Bea", "nested": {"salary": 1}}, **extra}
    assert seen.json["hash"] == last.json["hash"] != whole.json["hash"], "each is told its own"
    assert seen.headers["ETag"] != whole.headers["ETag"]
    known = {"If-None-Match": seen.headers["ETag"]}
    assert (await tail(anyone, key, "last=1", known)).status == 304
    assert (await tail(editor, key, "last=1", known)).status == 200
    assert (await tail(anyone, key, "last=0")).json["data"] == {"items": []}


async def test_members_are_hidden_in_a_long_log(anyone: Browser, base: str, unique: Unique) -> None:
    editor = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    key, text = unique("salaries"), "x" * 70_000
    for n in range(100):
        assert (await append(editor, key, {"n": n, "salary": n, "text": text})).status == 200
    pulled = await tail(anyone, key)
    assert b"salary" not in pulled.body
    assert [each["data"] for each in pulled.json["data"]["items"]] == [
        {"n": n, "text": text} for n in range(100)
    ]
