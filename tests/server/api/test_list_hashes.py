"""Lists with the hashes of what they name (docs/reference/protocol.md#lists-with-hashes)."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, SUBJECT, Browser, Signed, Start, minted_at, root_device
from support.collections import OWN, UNSIGNED, collection
from support.faulty_store import FaultyStore
from support.plugin_samples import Roles
from support.watched_store import WatchedFolder

from pysync import _core
from pysync.auth import issuing
from pysync.store import Store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

SERVICE: dict[str, Any] = {
    "collections": [
        collection("notes", listable=True),
        collection("log", listable=True, appendOnly=UNSIGNED),
        collection("files", listable=True, allowedMimeTypes=["image/png", "application/json"]),
        collection("top", "{id}", listable=True),
        collection("fading", listable=True, ttlMs=1000),
        collection("cards", listable=True, fieldPermissions={"pay": {"readRoles": ["admin"]}}),
        collection("mine", "u/{identity}/{id}", listable=True, **OWN,
                   fieldPermissions={"pay": {"readRoles": ["self"]}}),
        collection("rooms", "rooms/{room}", listable=True, readRoles=["cap:read:rooms", "cap:list:rooms"],
                   writeRoles=["cap:write:rooms"]),
        collection("drop", listable=True, pushOnly=True),
        collection("denied", listable=True,
                   restrictions={"mode": "allow", "identities": [SUBJECT.user_id], "actions": ["pull"]}),
    ],
    "namespaces": {"acme": {"collections": [collection("notes", "acme/{id}", listable=True)]}},
    "auth": {"adminToken": "a-token-of-these-tests", "trustedIssuers": [ISSUER.ed_pub]},
}  # fmt: skip
ADMIN = {"Authorization": "Bearer a-token-of-these-tests"}
NOT_AVAILABLE = (400, "hashes_not_available")


@pytest.fixture(params=["memory", "folder"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else await LocalStore.open_folder(tmp_path)


async def hashes(browser: Browser, target: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer = await browser.request("GET", f"/list{target}?hashes=true&limit=5000", headers=headers)
    assert answer.status == 200, answer.body
    assert answer.json.keys() == {"items", "hashes", "hasMore"}
    return dict(zip(answer.json["items"], answer.json["hashes"], strict=True))


def stored(data: str, ts_ms: int = 5) -> bytes:
    return _core.decode_push(b'{"data":{"n":%s}}' % data.encode()).stored(ts_ms)


def hash_of(document: bytes) -> str:
    return _core.read_document(document).hash


async def test_hashes_are_the_first_digits_of_those_that_pulls_show(
    start: Start, session: aiohttp.ClientSession, store: Store
) -> None:
    browser = Browser(await start(SERVICE, store), session)
    for key in ("notes/a", "notes/b", "one", "files/document"):
        assert (await browser.push(key, {"key": key})).status == 200
    for n in range(3):
        assert (await browser.request("POST", "/push/log/a", {"data": {"n": n}})).status == 200
    png = await browser.request("POST", "/push/files/a", b"bytes", {"Content-Type": "image/png"})
    shown = {
        **{key: (await browser.pull(key)).json["hash"] for key in ("notes/a", "notes/b", "one")},
        "files/document": (await browser.pull("files/document")).json["hash"],
        "log/a": (await browser.pull("log/a?last=1")).json["hash"],
        "files/a": png.json["hash"],
    }
    for prefix, names in (("notes", ["a", "b"]), ("log", ["a"]), ("files", ["a", "document"])):
        assert await hashes(browser, f"/{prefix}") == {name: shown[f"{prefix}/{name}"][:16] for name in names}
    assert await hashes(browser, "") == {"one": shown["one"][:16]}
    await browser.push("notes/a", {"n": 2}, shown["notes/a"])
    changed = await hashes(browser, "/notes")
    assert changed["a"] == (await browser.pull("notes/a")).json["hash"][:16] != shown["notes/a"][:16]


async def test_page_with_hashes_has_up_to_5000_names(
    start: Start, session: aiohttp.ClientSession, store: Store
) -> None:
    browser = Browser(await start(SERVICE, store), session)
    document, names = stored("1"), [f"n{n:04}" for n in range(5_001)]
    for name in names:
        await store.put(f"notes/{name}", document)

    async def page(query: str) -> tuple[int, int, bool]:
        answer = (await browser.request("GET", f"/list/notes?{query}")).json
        found = answer.get("hashes", [])
        assert set(found) <= {hash_of(document)[:16]}
        return len(answer["items"]), len(found), answer["hasMore"]

    assert await page("hashes=true") == (100, 100, True)
    assert await page("hashes=true&limit=5000") == (5_000, 5_000, True)
    assert await page("hashes=true&limit=9999") == (5_000, 5_000, True)
    assert await page("hashes=true&limit=5000&after=n0000") == (5_000, 5_000, False)
    assert await page("hashes=false&limit=5000") == (1_000, 0, True)
    assert await page("limit=5000") == (1_000, 0, True)


@pytest.mark.parametrize("value", ["", "1", "0", "TRUE", "yes", "true,false"])
async def test_hashes_are_true_or_false(start: Start, session: aiohttp.ClientSession, value: str) -> None:
    browser = Browser(await start(SERVICE), session)
    answer = await browser.request("GET", f"/list/notes?hashes={value}")
    assert (answer.error, answer.json["code"]) == ((400, "Invalid hashes parameter"), "bad_request")


async def test_what_is_damaged_has_no_hash_and_what_has_expired_keeps_its_own(
    start: Start, session: aiohttp.ClientSession, store: Store, now_ms: int
) -> None:
    browser = Browser(await start(SERVICE, store, now_ms=lambda: now_ms), session)
    old = stored("1", now_ms - 5_000)
    await store.put("fading/old", old)
    await store.put("fading/new", stored("2", now_ms))
    await store.put("notes/bad", stored("1").replace(b":1}", b":2}"))
    await store.put("notes/good", stored("1"))
    await store.put("log/bad", b"{")
    assert await hashes(browser, "/notes") == {"bad": None, "good": hash_of(stored("1"))[:16]}
    assert await hashes(browser, "/log") == {"bad": None}
    assert await hashes(browser, "/fading") == {"new": hash_of(stored("2"))[:16], "old": hash_of(old)[:16]}


class Near(FaultyStore):
    """A store on this machine."""

    is_remote = False


async def test_folder_reads_only_what_it_does_not_know(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    store = await WatchedFolder.open_folder(tmp_path)
    store.read = []
    browser = Browser(await start(SERVICE, store), session)
    hash_ = (await browser.push("notes/a", {"n": 1})).json["hash"]
    log = await browser.request("POST", "/push/log/a", {"data": {"n": 1}})
    png = await browser.request("POST", "/push/files/a", b"bytes", {"Content-Type": "image/png"})
    store.read.clear()
    for prefix, shown in (("notes", hash_), ("log", log.json["hash"]), ("files", png.json["hash"])):
        assert await hashes(browser, f"/{prefix}") == {"a": shown[:16]}
    assert store.read == []
    await store.put("notes/b", stored("1"))  # by another program
    assert await hashes(browser, "/notes") == {"a": hash_[:16], "b": hash_of(stored("1"))[:16]}
    assert store.read == ["notes/b"]


async def test_store_that_fails_is_no_list_without_hashes(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Near(MemoryStore())
    browser = Browser(await start(SERVICE, store), session)
    await store.put("notes/a", stored("1"))
    store.fail("get")
    assert (await browser.request("GET", "/list/notes?hashes=true")).error == (503, "store_unavailable")


class Far(MemoryStore):
    """A store on another machine, as a bucket is."""

    is_remote = True


async def test_there_are_none_in_a_bucket(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(await start(SERVICE, Far()), session)
    rejected = await browser.request("GET", "/list/notes?hashes=true")
    assert (rejected.error, rejected.json["code"]) == (NOT_AVAILABLE, "hashes_not_available")
    assert (await browser.request("GET", "/list/notes?hashes=false")).json == {"items": [], "hasMore": False}


async def test_readers_who_miss_members_get_none(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start(SERVICE)
    browser, owner = Browser(base, session), Signed(base, session, ISSUER, root_device(ISSUER))
    hash_ = (await browser.push("cards/a", {"pay": 1}, headers=ADMIN)).json["hash"]
    assert (await browser.request("GET", "/list/cards?hashes=true")).error == NOT_AVAILABLE
    assert (await owner.request("GET", "/list/cards?hashes=true")).error == NOT_AVAILABLE
    assert await hashes(browser, "/cards", ADMIN) == {"a": hash_[:16]}
    own = (await owner.push(f"u/{ISSUER.user_id}/a", {"pay": 1})).json["hash"]
    assert await hashes(owner, f"/u/{ISSUER.user_id}") == {"a": own[:16]}
    target = f"/list/u/{ISSUER.user_id}?hashes=true"
    assert (await browser.request("GET", target)).status == 401


async def test_only_those_who_could_pull_get_hashes(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start(SERVICE)
    owner = Signed(base, session, ISSUER, root_device(ISSUER, collections=("rooms", "*")))
    found = {name: (await owner.push(f"rooms/{name}", {"n": name})).json["hash"][:16] for name in "abc"}

    def member(ops: tuple[str, ...], *paths: str) -> Signed:
        grant = issuing.Grant(ops, paths)
        certificate = issuing.issue_member_certificate(
            ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=grant, **minted_at()
        )
        return Signed(base, session, SUBJECT, certificate)

    everything, denied = ("rooms", "rooms/**"), "!rooms/c"
    assert await hashes(member(("read", "list"), *everything, "!rooms/_members"), "/rooms") == found
    assert await hashes(member(("read", "list"), *everything, "!rooms/_members", denied), "/rooms") == {
        "a": found["a"],
        "b": found["b"],
    }
    assert await hashes(member(("read", "list"), "rooms", "rooms/b", "!rooms/_members"), "/rooms") == {
        "a": None, "b": found["b"], "c": None
    }  # fmt: skip
    lister = member(("list",), *everything, "!rooms/_members")
    assert (await lister.request("GET", "/list/rooms")).status == 200
    assert (await lister.request("GET", "/list/rooms?hashes=true")).error == NOT_AVAILABLE
    assert (await Browser(base, session).request("GET", "/list/rooms?hashes=true")).status == 401


async def test_nothing_is_shown_of_what_nobody_or_not_everybody_pulls(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(SERVICE), session)
    assert (await browser.request("GET", "/list/drop?hashes=true")).error == NOT_AVAILABLE
    assert (await browser.request("GET", "/list/denied")).status == 200
    assert (await browser.request("GET", "/list/denied?hashes=true")).error == NOT_AVAILABLE


async def test_there_are_none_where_a_plugin_gives_roles(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(SERVICE, plugins=[Roles({})]), session)
    assert (await browser.request("GET", "/list/notes?hashes=true")).error == NOT_AVAILABLE
    assert (await browser.request("GET", "/list/notes")).status == 200
