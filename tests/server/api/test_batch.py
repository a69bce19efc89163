"""Batch pulls: one request, each entry as a single pull would answer it.

See docs/reference/protocol.md#batch-pull.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from support.batches import batch, collection, entries, stored
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, minted_at, root_device
from support.collections import limit_of
from support.faulty_store import FaultyStore

from pysync.auth import issuing
from pysync.server.api.batch_reads import read_many
from pysync.store import NotModified, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

ADMIN = {"Authorization": "Bearer token-of-the-tests"}
EDITOR = SUBJECT.user_id
ME = ISSUER.user_id

Caller = Callable[[str, aiohttp.ClientSession], Browser]


SERVICE = {
    "auth": {
        "adminToken": "token-of-the-tests",
        "trustedIssuers": [ISSUER.ed_pub],
        "identityRoles": {EDITOR: ["editor"]},
        "spaces": {},
    },
    "collections": [
        collection("notes", "notes/{id}", cacheDurationMs=60_000),
        collection("special", "notes/special", cacheDurationMs=5_000),
        collection("mine", "users/{identity}/{id}", ["self", "admin"]),
        collection("rooms", "rooms/{room}", ["cap:read:rooms"], cacheDurationMs=30_000),
        collection("shared", "shared/{identity}/{id}", ["self", f"delegated:{ME}:rooms"]),
        collection("strict", "strict/{id}", requireAuth=True),
        collection("loose", "loose/{id}", ["editor"], requireAuth=False),
        collection("roots", "roots/{id}", ["cap:read:*", "cap:read:rooms"], rootOnly=True),
        collection("cards", "cards/{id}", fieldPermissions={"pay": {"readRoles": ["editor"]}}),
        collection("people", "people/{identity}/{id}", fieldPermissions={"pay": {"readRoles": ["self"]}}),
        collection("picked", "picked/{id}", restrictions={"mode": "allow", "identities": [EDITOR]}),
        collection("fading", "fading/{id}", ttlMs=1000),
        collection("spaceaccess", "spaces/{spaceId}/_access", ["space:member"]),
        collection("plans", "spaces/{spaceId}/plans/{id}", ["space:member"],
                   fieldPermissions={"pay": {"readRoles": ["space:owner"]}}),
        collection("dropbox", "dropbox/{id}", pushOnly=True),
        collection("files", "files/{id}", allowedMimeTypes=["image/png"]),
        collection("log", "log/{id}", appendOnly=True),
        collection("part", "boards/{id}", bundle="board"),
    ],
    "namespaces": {"acme": {"collections": [collection("notes", "acme/{id}")]}},
}  # fmt: skip


def documents(now_ms: int) -> dict[str, bytes]:
    """What the store holds, of what `SETS` name."""
    card = {"name": "A", "pay": 1e21, "n": 9007199254740993}
    return {
        "notes/a": stored({"n": [1, 2.5, {"é": None}]}),
        "notes/b": stored({}, author=ISSUER.ed_pub),
        "notes/special": b"no document",
        f"users/{ME}/a": stored({"mine": True}),
        f"users/{EDITOR}/a": stored({"mine": False}),
        "rooms/lobby": stored({"room": "lobby"}),
        "rooms/attic": stored({"room": "attic"}),
        f"shared/{ME}/a": stored({"shared": 1}),
        "strict/a": stored({"strict": 1}),
        "loose/a": stored({"loose": 1}),
        "roots/a": stored({"roots": 1}),
        "cards/a": stored(card, author=ISSUER.ed_pub),
        "cards/b": stored({"name": "B"}),
        "cards/c": b"{",
        f"people/{ME}/a": stored(card),
        f"people/{EDITOR}/a": stored(card),
        "picked/a": stored({"picked": 1}),
        "fading/old": stored({"n": 1}, now_ms - 1001),
        "fading/new": stored({"n": 2}, now_ms - 1000),
        "spaces/one/_access": stored({"v": 1, "owner": ME, "members": [EDITOR]}),
        "spaces/two/_access": stored({"v": 1, "owner": EDITOR, "members": []}),
        "spaces/odd/_access": b"{",
        "spaces/one/plans/a": stored(card),
        "spaces/two/plans/a": stored(card),
        "acme/a": stored({"acme": 1}),
    }


IDS = [{"id": name} for name in ("a", "b", "c", "gone", "a/b", "a\n", "..", "")]
OWNED = [{"identity": who, "id": "a"} for who in (ME, EDITOR, STRANGER.user_id)]
SPACES = [{"spaceId": name, "id": "a"} for name in ("one", "two", "odd", "gone", "a.b")]
SETS: dict[str, list[dict[str, str]]] = {
    **dict.fromkeys(("notes", "strict", "loose", "roots", "cards", "picked"), IDS),
    **dict.fromkeys(("mine", "shared", "people"), OWNED),
    "special": [{}],
    "rooms": [{"room": name} for name in ("lobby", "attic", "gone")],
    "fading": [{"id": "old"}, {"id": "new"}],
    "spaceaccess": SPACES,
    "plans": SPACES,
}


def anonymous(base: str, session: aiohttp.ClientSession) -> Browser:
    return Browser(base, session)


def root(base: str, session: aiohttp.ClientSession) -> Browser:
    return Signed(base, session, ISSUER, root_device(ISSUER, collections=("rooms", "*")))


def member(base: str, session: aiohttp.ClientSession) -> Browser:
    """A member who may read the lobby, and that alone of the rooms."""
    grant = issuing.Grant(("read",), ("rooms/lobby", "spaces/**", "cards/**", "shared/**"))
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=grant, **minted_at()
    )
    return Signed(base, session, SUBJECT, certificate)


def subject(base: str, session: aiohttp.ClientSession) -> Browser:
    return Signed(base, session, SUBJECT, root_device(SUBJECT, collections=("rooms", "*")))


def untrusted(base: str, session: aiohttp.ClientSession) -> Browser:
    return Signed(base, session, STRANGER, root_device(STRANGER, collections=("rooms", "*")))


CALLERS: list[Caller] = [anonymous, root, member, subject, untrusted]


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
async def anyone(start: Start, session: aiohttp.ClientSession, store: FaultyStore, now_ms: int) -> Browser:
    """An anonymous caller of `SERVICE`, which holds `documents()` and whose clock stands still."""
    for key, body in documents(now_ms).items():
        await store.put(key, body)
    return Browser(await start(SERVICE, store=store, now_ms=lambda: now_ms), session)


async def single(browser: Browser, name: str, params: dict[str, str]) -> bytes:
    """The batch entry that a single pull amounts to."""
    template = next(found["storagePath"] for found in SERVICE["collections"] if found["name"] == name)  # type: ignore[index]
    key = template
    for param, value in params.items():
        key = key.replace(f"{{{param}}}", quote(value, safe=""))
    pulled = await browser.pull(key)
    if pulled.status == 200:
        return pulled.body
    expected_error = {401: "Forbidden", 404: "Collection not found"}.get(pulled.status, pulled.json["error"])
    return json.dumps({"error": expected_error}, separators=(",", ":")).encode()


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("seed", range(4))
async def test_a_batch_answers_what_single_pulls_answer(anyone: Browser, caller: Caller, seed: int) -> None:
    """Any batch, in any order, the same bytes."""
    draw = random.Random(seed)
    browser = caller(anyone.base, anyone.session)
    for _ in range(4):
        names = draw.sample(list(SETS), draw.randint(1, 6))
        params = {name: draw.choices(SETS[name], k=draw.randint(1, 6)) for name in names}
        answer = await batch(browser, *names, params=params)
        expected = [
            b'"%b":[%b]'
            % (name.encode(), b",".join([await single(browser, name, wanted) for wanted in params[name]]))
            for name in names
        ]
        assert answer.body == b'{"collections":{%b}}' % b",".join(expected)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("seed", range(4))
async def test_versions_that_the_client_has_are_not_sent_again(
    anyone: Browser, caller: Caller, seed: int
) -> None:
    """All other entries are as they are without `known`."""
    draw = random.Random(seed)
    browser = caller(anyone.base, anyone.session)
    for _ in range(4):
        names = draw.sample(list(SETS), draw.randint(1, 6))
        params = {name: draw.choices(SETS[name], k=draw.randint(1, 6)) for name in names}
        expected = (await batch(browser, *names, params=params)).json["collections"]
        known: dict[str, list[str | None]] = {}
        for name in draw.sample(names, draw.randint(1, len(names))):
            known[name] = [
                draw.choice([entry.get("hash", "")[:16] or None, None, "0123456789abcdef"])
                for entry in expected[name]
            ]
            expected[name] = [
                {"unchanged": True, "hash": entry["hash"], "timestamp": entry["timestamp"]}
                if digits is not None and entry.get("hash", "").startswith(digits)
                else entry
                for entry, digits in zip(expected[name], known[name], strict=True)
            ]
        answer = await batch(browser, *names, params=params, known=known)
        assert answer.json["collections"] == expected


async def test_an_administrator_reads_for_everybody(anyone: Browser) -> None:
    answer = await batch(anyone, "mine", params={"mine": OWNED}, headers=ADMIN)
    assert [entry.get("data") for entry in entries(answer, "mine")] == [{"mine": True}, {"mine": False}, {}]


async def test_the_identity_is_the_callers_where_none_is_given(anyone: Browser) -> None:
    mine = root(anyone.base, anyone.session)
    assert entries(await batch(mine, "mine", params={"mine": [{"id": "a"}]}), "mine")[0]["data"] == {
        "mine": True
    }
    nothings: list[dict[str, list[object]] | None] = [None, {}, {"notes": []}]
    for nothing in nothings:
        missing = [{"error": "Missing required path parameter"}]
        assert entries(await batch(mine, "mine", params=nothing), "mine") == missing
        assert entries(await batch(anyone, "mine", params=nothing), "mine") == missing


async def test_a_collection_with_no_param_sets_requests_nothing(anyone: Browser, store: FaultyStore) -> None:
    await store.put("mine", stored({"n": 1}))
    reads = store.calls["get"]
    mine = root(anyone.base, anyone.session)
    answer = await batch(mine, "notes", "mine", "gone", params={"notes": [], "gone": []})
    missing = [{"error": "Missing required path parameter"}]
    assert answer.json["collections"] == {"notes": [], "mine": missing, "gone": []}
    unknown = await batch(anyone, "gone", params={"gone": []})
    assert (unknown.status, unknown.json["collections"]) == (200, {"gone": []})
    assert unknown.headers["Cache-Control"] == "no-cache"
    alone = await batch(anyone, "notes", params={"notes": []}, append={"notes": []})
    assert (alone.status, alone.json["collections"]) == (200, {"notes": []})
    rejected = await batch(anyone, "log", params={"log": []}, append={"log": [{"last": 1}]})
    assert rejected.error == (400, "Invalid appendParams parameter")
    assert store.calls["get"] <= reads + 1, "the revocation list at most"


@pytest.mark.parametrize("id_", ["team_members", "x_keyring", "_keyring.x", "_members2"])
async def test_deny_suffixes_are_whole_last_segments(anyone: Browser, store: FaultyStore, id_: str) -> None:
    await store.put(f"notes/{id_}", stored({"n": 1}))
    answer = await batch(anyone, "notes", "_keyring.x", params={"notes": [{"id": id_}]})
    assert entries(answer, "notes")[0]["data"] == {"n": 1}
    assert entries(answer, "_keyring.x") == [{"error": "Collection not found"}]


async def test_names_of_collections_are_denied_by_their_end(
    start: Start, session: aiohttp.ClientSession
) -> None:
    served = ["org_members", "members", "_members2", "Org_Members"]
    base = await start({"collections": [collection(name, f"{name}/{{id}}") for name in served]})
    for name in served:
        answer = await batch(Browser(base, session), name, params={name: [{"id": "a"}]})
        if name == "org_members":
            assert answer.error == (400, "batch_key_denied")
        else:
            assert answer.status == 200


async def test_denied_keys_may_have_any_depth_and_suffixes_several_segments(
    start: Start, session: aiohttp.ClientSession
) -> None:
    service = {
        "collections": [collection("deep", "vault/{u}/{id}"), collection("top", "{id}")],
        "batchKeyDenySuffixes": ["_keyring", "u/secret", "/_leading"],
    }
    browser = Browser(await start(service), session)
    for name, params, is_denied in (
        ("deep", {"u": "u", "id": "_keyring"}, True),
        ("deep", {"u": "u", "id": "secret"}, True),
        ("deep", {"u": "u", "id": "_leading"}, True),
        ("deep", {"u": "xu", "id": "secret"}, False),
        ("deep", {"u": "_keyring", "id": "x"}, False),
        ("top", {"id": "_keyring"}, True),
        ("top", {"id": "a_keyring"}, False),
    ):
        answer = await batch(browser, name, params={name: [params]})
        assert answer.status == (400 if is_denied else 200), params


async def test_a_member_reads_its_own_room_and_not_its_siblings(anyone: Browser) -> None:
    answer = await batch(
        member(anyone.base, anyone.session), "rooms", params={"rooms": [{"room": "attic"}, {"room": "lobby"}]}
    )
    first, second = entries(answer, "rooms")
    assert first == {"error": "Forbidden"}
    assert second["data"] == {"room": "lobby"}


async def test_each_entry_is_authorised_against_the_space_it_is_in(anyone: Browser) -> None:
    answer = await batch(root(anyone.base, anyone.session), "spaceaccess", params={"spaceaccess": SPACES})
    first, *others = entries(answer, "spaceaccess")
    assert first["data"]["owner"] == ME
    assert others == [{"error": "Forbidden"}] * 4


async def test_access_documents_are_read_once(anyone: Browser, store: FaultyStore) -> None:
    spaces = [{"spaceId": "one"}, {"spaceId": "two"}]
    params = {"spaceaccess": spaces, "plans": [{**space, "id": "a"} for space in spaces]}
    browser = subject(anyone.base, anyone.session)
    await batch(browser, "plans", params=params)  # after this the secret of versions is known
    store.calls.clear()
    await batch(browser, "spaceaccess", "plans", params=params)
    assert store.calls["get"] == 2 + 2


async def test_a_space_that_cannot_be_read_fails_its_own_entries(anyone: Browser, store: FaultyStore) -> None:
    browser = root(anyone.base, anyone.session)
    await batch(browser, "spaceaccess", params={"spaceaccess": [{"spaceId": "one"}]})
    store.fail("get")
    answer = await batch(
        browser, "spaceaccess", "notes", params={"spaceaccess": SPACES[:1], "notes": IDS[:1]}
    )
    assert entries(answer, "spaceaccess") == [{"error": "Authorization error"}]
    assert entries(answer, "notes")[0]["hash"] != ""
    again = await batch(browser, "spaceaccess", params={"spaceaccess": SPACES[:1]})
    assert entries(again, "spaceaccess")[0]["data"]["owner"] == ME


@pytest.mark.parametrize("spoil", ["signature", "certificate", "replay"])
async def test_credentials_that_do_not_hold_make_a_batch_anonymous(anyone: Browser, spoil: str) -> None:
    browser = root(anyone.base, anyone.session)
    assert isinstance(browser, Signed)
    if spoil == "replay":
        browser.nonce = b"\x07" * 16
        accepted = await batch(browser, "notes", params={"notes": [{"id": "a"}]})
        assert "WWW-Authenticate" not in accepted.headers
    spoilt = {"signature": "X-Starfish-Sig", "certificate": "Authorization", "replay": "X-Unknown"}[spoil]
    browser.tamper = lambda headers: headers.update({spoilt: "Cap e30="})
    params = {"notes": [{"id": "a"}], "mine": [{"identity": ME, "id": "a"}, {"id": "a"}]}
    answer = await batch(browser, "notes", "mine", params=params)
    assert entries(answer, "notes")[0]["data"] == {"n": [1, 2.5, {"é": None}]}
    forbidden, missing = entries(answer, "mine")
    assert forbidden == {"error": "Forbidden"}
    assert missing == {"error": "Missing required path parameter"}
    assert answer.headers["WWW-Authenticate"] == "Cap", "a caller learns that it counts as anonymous"


async def test_namespaces_keep_to_themselves(anyone: Browser) -> None:
    params = {"notes": [{"id": "a"}], "special": [{}]}
    here = await batch(anyone, "notes", params=params)
    there = await batch(anyone, "notes", "special", params=params, prefix="/acme")
    assert entries(here, "notes")[0]["data"] != entries(there, "notes")[0]["data"] == {"acme": 1}
    assert entries(there, "special") == [{"error": "Collection not found"}]


async def test_sets_that_a_batch_does_not_serve_are_not_found_each(anyone: Browser) -> None:
    names = ("gone", "dropbox", "files", "part")
    answer = await batch(anyone, *names, params={name: [{"id": "a"}, {}] for name in names})
    assert answer.json["collections"] == {name: [{"error": "Collection not found"}] * 2 for name in names}


async def test_repeated_names_and_empty_slots_are_dropped(anyone: Browser) -> None:
    answer = await anyone.request("GET", "/batch/pull?collections=,special,,special,")
    assert answer.json == {"collections": {"special": [{"error": "document_corrupt"}]}}


async def test_expired_documents_are_missing(anyone: Browser, now_ms: int) -> None:
    old, new = entries(await batch(anyone, "fading", params={"fading": SETS["fading"]}), "fading")
    assert old == {"data": {}, "hash": "", "timestamp": now_ms}
    assert new["data"] == {"n": 2}


async def test_parameters_may_be_numbers_and_others_are_ignored(anyone: Browser, store: FaultyStore) -> None:
    await store.put("notes/7", stored({"seven": 7}))
    answer = await batch(anyone, "notes", params={"notes": [{"id": 7, "append_field": {"x": [None]}}]})
    assert entries(answer, "notes")[0]["data"] == {"seven": 7}


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("", "Missing required query parameter: collections"),
        ("collections=", "Missing required query parameter: collections"),
        ("collections=,,", "Missing required query parameter: collections"),
        ("collections=notes&params=%7B", "Invalid params parameter"),
        ("collections=notes&params=%FF", "Invalid params parameter"),
        ('collections=notes&params={"notes":{"id":"a"}}', "Invalid params parameter"),
        ('collections=notes&params={"notes":[{"id":["a"]}]}', "Invalid params parameter"),
        ("collections=notes&appendParams=1", "Invalid appendParams parameter"),
        ('collections=notes&appendParams={"notes":[{"last":1},null]}', "Invalid appendParams parameter"),
        ('collections=notes&appendParams={"notes":[{"last":-1}]}', "Invalid appendParams parameter"),
        ('collections=notes&appendParams={"notes":[{"since":1.5}]}', "Invalid appendParams parameter"),
        ('collections=notes&appendParams={"notes":[{"full":true}]}', "Invalid appendParams parameter"),
        ('collections=log&appendParams={"log":[{"last":5001}]}', "Batch append element budget exceeded"),
        ("collections=" + ",".join(f"n{n}" for n in range(101)), "Too many collections"),
        ('collections=notes&params={"notes":[{}' + ",{}" * 100 + "]}", "Too many collections"),
        ("collections=notes,_keyring", "batch_key_denied"),
        ("collections=%5Fmembers", "batch_key_denied"),
        ("collections=notes,org_members", "batch_key_denied"),
        ('collections=org_members&params={"org_members":[]}', "batch_key_denied"),
        ("collections=x_keyring,notes", "batch_key_denied"),
        ('collections=notes&params={"notes":[{"id":"_keyring"}]}', "batch_key_denied"),
        ('collections=notes&params={"notes":[{"id":"%5Fkeyring"}]}', "batch_key_denied"),
        ('collections=notes&params={"notes":[{"id":"\\u005fkeyring"}]}', "batch_key_denied"),
        ('collections=notes&params={"notes":[{"id":"a"},{"id":"_members"}]}', "batch_key_denied"),
    ],
)
async def test_a_faulty_batch_is_rejected_before_anything_is_read(
    anyone: Browser, store: FaultyStore, query: str, error: str
) -> None:
    store.calls.clear()
    answer = await anyone.request("GET", f"/batch/pull?{query}".replace('"', "%22").replace("\\", "%5C"))
    assert answer.error == (400, error)
    assert (
        answer.json["code"]
        == {
            "Missing required query parameter: collections": "missing_collections",
            "Invalid params parameter": "invalid_params",
            "Invalid appendParams parameter": "invalid_append_params",
            "Batch append element budget exceeded": "batch_append_budget_exceeded",
            "Too many collections": "too_many_collections",
            "batch_key_denied": "batch_key_denied",
        }[error]
    )
    assert store.calls["get"] == 0


async def test_append_parameters_are_for_logs(anyone: Browser) -> None:
    answer = await batch(
        anyone, "notes", params={"notes": IDS[:2]}, append={"notes": [{"last": 1}, None], "gone": [{}]}
    )
    first, second = entries(answer, "notes")
    assert first == {"error": "append_params_not_supported"}
    assert second["hash"] != ""


async def test_limits_and_suffixes_are_configured(start: Start, session: aiohttp.ClientSession) -> None:
    members = {"maxCollectionsPerBatch": 1, "maxBatchAppendElements": 1, "batchKeyDenySuffixes": ["a.key"]}
    service = {"collections": [collection("notes", "notes/{id}")], **members}
    browser = Browser(await start(service), session)
    assert (await batch(browser, "notes", params={"notes": [{"id": "x_keyring"}]})).status == 200
    for answer, error in (
        (await batch(browser, "notes", "other"), "Too many collections"),
        (await batch(browser, "notes", params={"notes": IDS[:2]}), "Too many collections"),
        (await batch(browser, "a.key"), "batch_key_denied"),
        (
            await batch(browser, "notes", append={"notes": [{"last": 2}]}),
            "Batch append element budget exceeded",
        ),
    ):
        assert answer.error == (400, error)


async def test_a_known_answer_is_304_until_an_entry_changes(anyone: Browser, store: FaultyStore) -> None:
    params = {"notes": [{"id": "a"}, {"id": "gone"}]}
    first = await batch(anyone, "notes", params=params)
    tag = first.headers["ETag"]
    assert tag.startswith('W/"')
    for condition in (tag, tag.removeprefix("W/"), f'"x", {tag}', "*"):
        known = await batch(anyone, "notes", params=params, headers={"If-None-Match": condition})
        assert (known.status, known.body, known.headers["ETag"]) == (304, b"", tag)
        assert known.headers["Cache-Control"] == first.headers["Cache-Control"]
    await store.put("notes/gone", stored({"here": 1}))
    changed = await batch(anyone, "notes", params=params, headers={"If-None-Match": tag})
    assert changed.status == 200
    assert changed.headers["ETag"] != tag
    store.fail("get", times=2)
    failing = await batch(anyone, "notes", params=params, headers={"If-None-Match": changed.headers["ETag"]})
    assert entries(failing, "notes") == [{"error": "store_unavailable"}] * 2


async def test_readers_who_see_different_fields_get_different_etags(anyone: Browser) -> None:
    params = {"cards": [{"id": "a"}]}
    less = await batch(anyone, "cards", params=params)
    more = await batch(subject(anyone.base, anyone.session), "cards", params=params)
    assert "pay" not in entries(less, "cards")[0]["data"]
    assert "pay" in entries(more, "cards")[0]["data"]
    assert less.headers["ETag"] != more.headers["ETag"]


@pytest.mark.parametrize(
    ("params", "control"),
    [
        ({"notes": [{"id": "a"}]}, "public, max-age=60"),
        ({"notes": [{"id": "a"}], "rooms": [{"room": "lobby"}]}, "private, max-age=30"),
        ({"notes": [{"id": "a"}], "cards": [{"id": "a"}]}, "private, no-cache"),
        ({"rooms": [{"room": "lobby"}], "cards": [{"id": "a"}]}, "private, no-cache"),
        ({"notes": [{"id": "a"}], "special": [{}]}, "private, no-cache"),
        ({"notes": [{"id": "a"}, {}]}, "private, no-cache"),
        ({"gone": [{}]}, "private, no-cache"),
    ],
)
async def test_a_batch_is_cached_as_its_most_private_entry(
    anyone: Browser, params: dict[str, Any], control: str
) -> None:
    answer = await batch(root(anyone.base, anyone.session), *params, params=params)
    assert answer.headers["Cache-Control"] == control
    assert answer.headers["Vary"] == "Authorization"


async def test_head_reports_the_headers_of_a_get(anyone: Browser) -> None:
    target = "/batch/pull?collections=special"
    got, head_reply = await anyone.request("GET", target), await anyone.request("HEAD", target)
    assert (head_reply.status, head_reply.body, head_reply.headers["ETag"]) == (200, b"", got.headers["ETag"])
    assert (await anyone.request("POST", target)).status == 405


async def test_each_named_collection_counts_once(start: Start, session: aiohttp.ClientSession) -> None:
    metered = {"rateLimit": {"pull": limit_of(2)}}
    service = {"collections": [collection("a", "a/{id}", **metered), collection("b", "b/{id}")]}
    browser = Browser(await start(service), session)
    for _ in range(2):
        assert (await batch(browser, "b", "a", params={"a": IDS[:3]})).status == 200
    rejected = await batch(browser, "a", "b")
    assert rejected.error == (429, "Rate limit exceeded")
    assert (await batch(browser, "b")).status == 200


async def test_a_mounted_namespace_is_signed_in_either_form(
    start: Start, session: aiohttp.ClientSession
) -> None:
    own = {"collections": [collection("mine", "u/{identity}", ["self"])]}
    base = await start({"server": {"mountPath": "/v1"}, "namespaces": {"acme": own}})
    certificate = root_device(ISSUER)
    for outside, prefix in ((base, "/v1/acme"), (base + "/v1", "/acme")):
        browser = Signed(outside, session, ISSUER, certificate)
        assert entries(await batch(browser, "mine", prefix=prefix), "mine")[0]["hash"] == ""


@pytest.mark.parametrize("path", ["notes/{id}", "users/{id}/note", "{id}"])
async def test_the_documents_of_a_batch_are_read_together(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, path: str
) -> None:
    reads: list[int] = []

    class Watched(LocalStore):
        async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
            reads.append(1)
            return await super().get(key, if_none_match)

        async def get_many(
            self, keys: Sequence[str], max_bytes: float = inf
        ) -> dict[str, StoredObject | None]:
            reads.append(len(keys))
            return await super().get_many(keys, max_bytes)

    store = await Watched.open_folder(tmp_path)
    members = {"coordinator": "memory:", "collections": [collection("notes", path)]}
    browser = Browser(await start(members, store), session)
    wanted = [{"id": f"n{n}"} for n in range(50)]
    for each in wanted[:40]:
        await store.put(path.format(**each), stored(each))
    answer = await batch(browser, "notes", params={"notes": wanted})
    assert [each["data"] for each in entries(answer, "notes")] == [*wanted[:40], *[{}] * 10]
    assert reads == [50]


async def test_a_batch_with_an_error_is_built_anew(anyone: Browser, store: FaultyStore) -> None:
    target = "/batch/pull?collections=notes&params=" + quote(json.dumps({"notes": [{"id": "a"}]}))
    store.fail("get")
    assert "error" in entries(await anyone.request("GET", target), "notes")[0]
    store.fail("get")
    failed = await anyone.request("HEAD", target)
    whole = await anyone.request("GET", target)
    assert failed.headers["ETag"] != whole.headers["ETag"]
    known = await anyone.request("GET", target, headers={"If-None-Match": whole.headers["ETag"]})
    assert known.status == 304


async def test_reads_wait_for_the_store_together(anyone: Browser, store: FaultyStore) -> None:
    release = asyncio.Event()
    wanted = [{"id": f"n{n % 80}"} for n in range(100)]
    arrived = [store.delay("get", release) for _ in range(80)]
    store.calls.clear()
    pulling = asyncio.create_task(batch(anyone, "notes", params={"notes": wanted}))
    for event in arrived:
        await event.wait()
    release.set()
    assert len(entries(await pulling, "notes")) == 100
    assert store.calls["get"] == 80, "each distinct key once"
    assert store.max_concurrent_reads == 80


async def test_concurrent_reads_are_bounded_as_configured() -> None:
    store = FaultyStore(MemoryStore())
    await store.put("k/3", b"three")
    store.fail("get")
    found = await read_many(store, [f"k/{n}" for n in range(9)], at_once=3)
    assert store.max_concurrent_reads <= 3
    read = {key: each.body if isinstance(each, StoredObject) else each for key, each in found.items()}
    assert read == {f"k/{n}": None for n in range(9)} | {"k/0": "store_unavailable", "k/3": b"three"}
