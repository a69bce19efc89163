"""Lists: who may see which names, page by page (docs/reference/protocol.md#list)."""

from collections.abc import Iterable
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clients import ISSUER, SUBJECT, Browser, Reply, Signed, Start, minted_at, root_device
from support.collections import PUBLIC, limit_of
from support.faulty_store import FaultyStore

from pysync import _core
from pysync.auth import issuing
from pysync.config.key_templates import are_parameters, is_parameter
from pysync.server.api import listing
from pysync.store.memory import MemoryStore

NOTES = {"name": "notes", "storagePath": "notes/{id}", "listable": True, **PUBLIC}
CAPPED = {"readRoles": ["cap:list:rooms"], "writeRoles": ["cap:write:rooms"], "listable": True}
OWN = {"readRoles": ["self"], "writeRoles": ["self"], "listable": True}
SERVICE: dict[str, Any] = {
    "collections": [
        NOTES,
        {"name": "top", "storagePath": "{id}", "listable": True, **PUBLIC},
        {"name": "plain", "storagePath": "plain/{id}", **PUBLIC},
        {
            "name": "nested",
            "storagePath": "a/{x}/c/{y}",
            "listable": True,
            **PUBLIC,
            "cacheDurationMs": 60_000,
        },
        {"name": "mine", "storagePath": "users/{identity}/{id}", **OWN},
        {"name": "people", "storagePath": "people/{identity}", **OWN},
        {"name": "rooms", "storagePath": "rooms/{room}", **CAPPED},
        {"name": "members", "storagePath": "rooms/{room}/{part}", **CAPPED},
    ],
    "namespaces": {"acme": {"collections": [{**NOTES, "storagePath": "acme/{id}"}]}},
    "auth": {"trustedIssuers": [ISSUER.ed_pub]},
}


class Counting(MemoryStore):
    """Remembers what it was asked to list."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[tuple[str, str | None, int]] = []

    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]:
        self.queries.append((prefix, after, limit))
        return await super().list(prefix, after, limit)


async def fill(store: MemoryStore, *keys: str) -> None:
    for key in keys:
        await store.put(key, b"{}")


async def listed(browser: Browser, target: str) -> tuple[list[str], bool]:
    answer = await browser.request("GET", target)
    assert answer.status == 200, answer.body
    return answer.json["items"], answer.json["hasMore"]


async def test_names_come_once_in_code_point_order_and_deeper_keys_add_none(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    browser = Browser(await start(SERVICE, store=store), session)
    await fill(store, "notes/b", "notes/a", "notes/Z", "notes/a/_keyring", "notes/ghost/_keyring", "notesx/n")
    assert await listed(browser, "/list/notes") == (["Z", "a", "b"], False)
    assert await listed(browser, "/list/a/x/c") == ([], False)


async def test_pages_follow_each_other_past_any_number_of_keys(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Counting()
    browser = Browser(await start(SERVICE, store=store), session)
    names = [f"n{number:05}" for number in range(2_600)]
    await fill(store, *(f"notes/{name}" for name in names))
    assert await listed(browser, "/list/notes") == (names[:100], True)
    found, more, target = [], True, "/list/notes?limit=1000"
    while more:
        page, more = await listed(browser, target)
        found += page
        target = f"/list/notes?limit=1000&after={page[-1]}"
    assert found == names
    assert [limit for _, _, limit in store.queries] == [101, 1001, 1001, 1001]


async def test_a_page_that_ends_with_the_last_name_has_no_more(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    browser = Browser(await start(SERVICE, store=store), session)
    await fill(store, "notes/a", "notes/b", "notes/c")
    assert await listed(browser, "/list/notes?limit=3") == (["a", "b", "c"], False)
    assert await listed(browser, "/list/notes?limit=2") == (["a", "b"], True)
    assert await listed(browser, "/list/notes?limit=1&after=b") == (["c"], False)
    assert await listed(browser, "/list/notes?after=absent") == (["b", "c"], False)
    assert await listed(browser, "/list/notes?after=c") == ([], False)


@pytest.mark.parametrize("limit", ["1001", "99999", "9" * 5000])
async def test_a_limit_above_the_largest_is_the_largest(
    start: Start, session: aiohttp.ClientSession, limit: str
) -> None:
    store = Counting()
    browser = Browser(await start(SERVICE, store=store), session)
    await listed(browser, f"/list/notes?limit={limit}")
    assert store.queries == [("notes", None, 1001)]


@pytest.mark.parametrize("limit", ["", "0", "-1", "+1", "01", "1.0", "1e2", "%201", "1%0A", "x", "%D9%A1"])
async def test_a_limit_that_is_no_canonical_positive_number_is_rejected(
    start: Start, session: aiohttp.ClientSession, limit: str
) -> None:
    browser = Browser(await start(SERVICE), session)
    answer = await browser.request("GET", f"/list/notes?limit={limit}")
    assert answer.error == (400, "Invalid limit parameter")


@pytest.mark.parametrize(
    "after", ["", ".", "..", "a..b", "a/b", "a%2Fb", "a%0A", "a%20b", "%C3%A9", "a" * 256]
)
async def test_an_after_that_no_parameter_could_hold_is_rejected(
    start: Start, session: aiohttp.ClientSession, after: str
) -> None:
    browser = Browser(await start(SERVICE), session)
    answer = await browser.request("GET", f"/list/notes?after={after}")
    assert answer.error == (400, "Invalid after parameter")


async def test_only_requestable_names_are_listed_and_they_fill_the_page(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    browser = Browser(await start(SERVICE, store=store), session)
    await fill(
        store, *(f"notes/a b{number}" for number in range(9)), "notes/é", "notes/" + "x" * 256, "notes/a..b"
    )
    await fill(store, "notes/b", "notes/c")
    assert await listed(browser, "/list/notes?limit=1") == (["b"], True)
    assert await listed(browser, "/list/notes?limit=2") == (["b", "c"], False)


async def test_a_key_that_another_collection_spells_out_is_not_listed(
    start: Start, session: aiohttp.ClientSession
) -> None:
    secret = {"name": "secret", "storagePath": "notes/secret", "readRoles": ["admin"]}
    other = {"name": "other", "storagePath": "{a}/also", "readRoles": ["admin"]}
    store = MemoryStore()
    browser = Browser(await start({"collections": [NOTES, secret, other]}, store=store), session)
    await fill(store, "notes/note", "notes/secret")
    assert (await browser.push("notes/also", {"n": 1})).status == 200
    assert await listed(browser, "/list/notes") == (["also", "note"], False)
    assert (await browser.pull("notes/also")).json["data"] == {"n": 1}
    assert (await browser.pull("notes/secret")).status == 401


async def test_a_template_of_one_segment_lists_at_the_top(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    browser = Browser(await start(SERVICE, store=store), session)
    await fill(store, "one", "two", "notes/deeper", "_pysync/revocations/x")
    assert await listed(browser, "/list") == (["one", "two"], False)


async def test_the_route_exists_only_where_the_collection_is_listable(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(SERVICE), session)
    assert (await browser.request("GET", "/list/plain")).error == (404, "Not found")
    assert (await browser.request("GET", "/list/notes/n")).error == (404, "Not found")
    rejected = await browser.request("POST", "/list/notes", {})
    assert (rejected.status, rejected.headers["Allow"]) == (405, "GET, HEAD")
    assert (await browser.request("GET", "/list/a/b%2Fd/c")).error == (400, "Invalid path parameter")


async def test_a_namespace_lists_its_own_collections(start: Start, session: aiohttp.ClientSession) -> None:
    store = MemoryStore()
    browser = Browser(await start(SERVICE, store=store), session)
    await fill(store, "acme/one", "notes/two")
    assert await listed(browser, "/acme/list/acme") == (["one"], False)
    assert (await browser.request("GET", "/acme/list/notes")).status == 404
    assert (await browser.request("GET", "/list/acme")).status == 404


async def test_a_list_is_cached_as_reads_are_and_has_a_head(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(SERVICE), session)
    assert (await browser.request("GET", "/list/notes")).headers["Cache-Control"] == "no-cache"
    cached = await browser.request("GET", "/list/a/x/c")
    assert cached.headers["Cache-Control"] == "public, max-age=60"
    head = await browser.request("HEAD", "/list/a/x/c")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == cached.headers["Content-Length"]


async def test_prefix_with_an_identity_lists_the_callers_own_names(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    base = await start(SERVICE, store=store)
    owner = Signed(base, session, ISSUER, root_device(ISSUER))
    await fill(store, f"users/{ISSUER.user_id}/a", f"users/{SUBJECT.user_id}/b")
    assert await listed(owner, f"/list/users/{ISSUER.user_id}") == (["a"], False)
    assert (await owner.request("GET", f"/list/users/{SUBJECT.user_id}")).error == (403, "Forbidden")
    nobody = Browser(base, session)
    assert (await nobody.request("GET", f"/list/users/{ISSUER.user_id}")).error == (401, "Unauthorized")


async def test_nobody_is_self_in_a_list_of_identities(start: Start, session: aiohttp.ClientSession) -> None:
    owner = Signed(await start(SERVICE), session, ISSUER, root_device(ISSUER))
    assert (await owner.push(f"people/{ISSUER.user_id}", {"n": 1})).status == 200
    assert (await owner.request("GET", "/list/people")).error == (403, "Forbidden")


def member(base: str, session: aiohttp.ClientSession, ops: tuple[str, ...], *paths: str) -> Signed:
    certificate = issuing.issue_member_certificate(
        ISSUER,
        SUBJECT.ed_pub,
        SUBJECT.kem_pub,
        "rooms",
        grant=issuing.Grant(ops, paths),
        **minted_at(),
    )
    return Signed(base, session, SUBJECT, certificate)


async def test_a_certificate_lists_where_its_operations_roles_and_paths_allow_it(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start(SERVICE)

    async def answered(target: str, ops: tuple[str, ...], *paths: str) -> int:
        answer: Reply = await member(base, session, ops, *paths).request("GET", target)
        return answer.status

    denied = "!rooms/_members"
    assert await answered("/list/rooms", ("list",), "rooms", "rooms/**", denied) == 200
    assert await answered("/list/rooms/r1", ("list",), "rooms/**", denied) == 200
    # `c/**` does not match `c`, so the usual certificates cannot list the top of their collection.
    assert await answered("/list/rooms", ("list",), "rooms/**", denied) == 403
    assert await answered("/list/rooms/r1", ("list",), "rooms/r2/**") == 403
    assert await answered("/list/rooms/_members", ("list",), "rooms/**", denied) == 403
    # The operation is there, the role that is asked for is not.
    assert await answered("/list/rooms/r1", ("read",), "rooms/**", denied) == 403


async def test_lists_are_limited_in_rate_by_their_own_rule(
    start: Start, session: aiohttp.ClientSession
) -> None:
    limited = {**NOTES, "rateLimit": {"list": limit_of(1)}}
    browser = Browser(await start({"collections": [limited]}), session)
    assert (await browser.pull("notes/a")).status == 200
    assert (await browser.request("GET", "/list/notes")).status == 200
    assert (await browser.request("GET", "/list/notes")).status == 429
    assert (await browser.pull("notes/a")).status == 200


async def test_a_store_that_fails_is_not_an_empty_collection(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start(SERVICE, store=store), session)
    store.fail("list")
    assert (await browser.request("GET", "/list/notes")).error == (503, "store_unavailable")


@given(st.sets(st.text(alphabet="aZ0.-_é \n", min_size=1, max_size=3).filter(lambda name: name not in "..")))
def test_names_are_judged_together_as_they_are_one_by_one(names: set[str]) -> None:
    assert are_parameters(sorted(names)) == all(map(is_parameter, names))


@given(
    st.sets(st.text(alphabet="ab-", min_size=1, max_size=4)),
    st.integers(1, 5),
    st.sampled_from([None, "a", "b-", "zz"]),
)
async def test_a_page_is_the_first_admitted_names_after_the_given_one(
    names: set[str], limit: int, after: str | None
) -> None:
    store = MemoryStore()
    await fill(store, *(f"p/{name}" for name in names))

    def admitted(found: list[str]) -> list[str]:
        return [name for name in found if "-" not in name]

    wanted = [name for name in admitted(sorted(names)) if name > (after or "")]
    found = await listing.list_page(store, "p", after, limit, admitted)
    assert found == (wanted[:limit], len(wanted) > limit)


ROOMS = [f"r{n:04}" for n in range(40)]


async def lister(
    start: Start, session: aiohttp.ClientSession, *paths: str, names: Iterable[str] = ROOMS
) -> tuple[Signed, Counting]:
    """Return a caller who may list `rooms`, except what its certificate denies, and the store."""
    store = Counting()
    collection = {
        "name": "rooms",
        "storagePath": "rooms/{room}",
        "readRoles": ["cap:read:rooms"],
        "writeRoles": ["cap:write:rooms"],
        "listable": True,
    }
    base = await start({"collections": [collection]}, store=store)
    await fill(store, *(f"rooms/{name}" for name in names))
    return member(base, session, ("read", "list"), "rooms", "rooms/**", "!rooms/_members", *paths), store


@pytest.mark.parametrize(
    ("denied", "left"),
    [
        ("!rooms/r0003", [name for name in ROOMS if name != "r0003"]),
        ("!rooms/r0003/**", ROOMS),
        ("!rooms/r000*", ROOMS[10:]),
        ("!rooms/*5", [name for name in ROOMS if name[-1] != "5"]),
        ("!**/r003?", ROOMS),
        ("!other/**", ROOMS),
    ],
)
async def test_names_that_the_certificate_denies_are_not_listed(
    start: Start, session: aiohttp.ClientSession, denied: str, left: list[str]
) -> None:
    caller, _ = await lister(start, session, "!rooms/none", denied)
    assert await listed(caller, "/list/rooms") == (left, False)
    for name in ROOMS:
        is_denied = (await caller.pull(f"rooms/{name}")).status == 403
        assert is_denied is (name not in left), "as a pull has it"


async def test_pages_are_full_and_continue_where_names_are_denied(
    start: Start, session: aiohttp.ClientSession
) -> None:
    caller, store = await lister(
        start, session, "!rooms/r00[x", "!rooms/r000*", "!rooms/r0015", "!rooms/r003*"
    )
    store.queries.clear()
    assert await listed(caller, "/list/rooms?limit=4") == (ROOMS[10:14], True)
    assert len(store.queries) == 2, "a page of its own size, then one that is as large as any"
    assert await listed(caller, "/list/rooms?limit=4&after=r0013") == (
        ["r0014", "r0016", "r0017", "r0018"],
        True,
    )
    assert await listed(caller, "/list/rooms?limit=11&after=r0018") == (ROOMS[19:30], False)
    assert await listed(caller, "/list/rooms?limit=11&after=r0029") == ([], False)
    store.queries.clear()
    assert await listed(caller, "/list/rooms?limit=10&after=r0019") == (ROOMS[20:30], False)


async def test_list_reads_a_bounded_number_of_denied_names(
    start: Start, session: aiohttp.ClientSession
) -> None:
    names = [f"a{n:05}" for n in range(2 * listing.MAX_SCANNED)]
    caller, store = await lister(start, session, "!rooms/a*", names=["Z", *names, "b"])
    assert await listed(caller, "/list/rooms?limit=5") == (["Z"], True)
    rejected = await caller.request("GET", "/list/rooms?limit=5&after=Z")
    assert rejected.error == (403, "Forbidden")
    assert sum(size for _, _, size in store.queries) < 3 * listing.MAX_SCANNED
    assert await listed(caller, "/list/rooms?after=a09500") == (["b"], False)


async def test_anonymous_caller_is_denied_no_names(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start(SERVICE)
    caller = member(base, session, ("read", "list"), "notes/**", "!notes/secret")
    assert (await caller.push("notes/secret", {"n": 1})).status == 200
    assert (await caller.pull("notes/secret")).status == 200
    assert await listed(caller, "/list/notes") == (["secret"], False)


@given(
    st.lists(st.text("ab*/{}", max_size=5), max_size=3),
    st.sets(st.text("ab.", min_size=1, max_size=4)),
    st.sampled_from(["", "a/", "b/a/"]),
)
def test_allowed_names_are_those_no_deny_covers(denies: list[str], names: set[str], prefix: str) -> None:
    scope = _core.Scope(["**", *(f"!{deny}" for deny in denies)], "ab")
    left = [name for name in sorted(names) if scope.allows(prefix + name)]
    assert scope.undenied(prefix, sorted(names)) == left
    assert scope.has_denies is bool(denies)
