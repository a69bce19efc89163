"""Spaces: roles from access documents, on every route (docs/reference/protocol.md#spaces)."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, root_device
from support.faulty_store import FaultyStore
from support.loop_time import loop_time

from pysync import _core
from pysync.auth.spaces import ROLE_TIMEOUT_S, Spaces
from pysync.config import SpacesConfig as Settings
from pysync.store import StoredObject
from pysync.store.memory import MemoryStore

OWNER, MEMBER, OTHER = ISSUER.user_id, SUBJECT.user_id, STRANGER.user_id

ACCESS = {
    "name": "spaceaccess",
    "storagePath": "spaces/{spaceId}/_access",
    "readRoles": ["space:member"],
    "writeRoles": ["space:owner"],
}
KEYRING = {**ACCESS, "name": "keyrings", "storagePath": "spaces/{spaceId}/_keyring"}
PLANS = {
    "name": "plans",
    "storagePath": "spaces/{spaceId}/plans/{id}",
    "readRoles": ["space:member"],
    "writeRoles": ["space:member"],
    "keyringPath": "spaces/{spaceId}/_keyring",
    "listable": True,
    "fieldPermissions": {"price": {"readRoles": ["space:owner"], "writeRoles": ["space:owner"]}},
}
LINKS = {
    "name": "links",
    "storagePath": "links/{spaceId}/{other}",
    "readRoles": ["space:member"],
    "keyringPath": "spaces/{other}/_keyring",
}
BOARD = {
    "name": "cards",
    "storagePath": "boards/{spaceId}",
    "bundle": "board",
    "readRoles": ["space:member"],
    "writeRoles": ["space:member"],
}


def access(owner: object = OWNER, *members: object) -> dict[str, object]:
    return {"v": 1, "owner": owner, "members": members}


class Scene:
    """A service with spaces, and three people."""

    def __init__(self, base: str, session: aiohttp.ClientSession, store: FaultyStore) -> None:
        self.store = store
        self.owner, self.member, self.stranger = (
            Signed(base, session, keys, root_device(keys)) for keys in (ISSUER, SUBJECT, STRANGER)
        )
        self.anyone = Browser(base, session)


@pytest.fixture
async def scene(start: Start, session: aiohttp.ClientSession) -> Scene:
    store = FaultyStore(MemoryStore())
    service = {"auth": {"spaces": {}}, "collections": [ACCESS, KEYRING, PLANS, LINKS, BOARD]}
    found = Scene(await start(service, store=store), session, store)
    for space, people in (("one", access(OWNER, MEMBER, 7)), ("two", access(OTHER))):
        await store.put(f"spaces/{space}/_access", stored(people))
    return found


def stored(data: object) -> bytes:
    return _core.decode_push(json.dumps({"data": data}).encode()).stored(1)


async def test_members_read_and_others_do_not(scene: Scene) -> None:
    for browser, status in (
        (scene.owner, 200),
        (scene.member, 200),
        (scene.stranger, 403),
        (scene.anyone, 401),
    ):
        assert (await browser.pull("spaces/one/_access")).status == status
        assert (await browser.push("spaces/one/plans/a", {}, "wrong")).status == (
            409 if status == 200 else status
        )
        assert (await browser.request("GET", "/list/spaces/one/plans")).status == status


async def test_a_role_in_one_space_is_none_in_another(scene: Scene) -> None:
    assert (await scene.stranger.pull("spaces/two/_access")).status == 200
    for key in ("spaces/two/_access", "spaces/two/plans/a", "spaces/absent/_access", "spaces/a.b/_access"):
        assert (await scene.owner.pull(key)).error == (403, "Forbidden")


async def test_the_owner_alone_changes_who_is_in(scene: Scene) -> None:
    pulled = await scene.owner.pull("spaces/one/_access")
    base = pulled.json["hash"]
    grab = access(MEMBER)
    assert (await scene.member.push("spaces/one/_access", grab, base)).error == (403, "Forbidden")
    assert (await scene.owner.push("spaces/one/_access", access(OTHER), base)).status == 200
    assert (await scene.owner.pull("spaces/one/_access")).status == 403, "handed over"
    assert (await scene.stranger.pull("spaces/one/_access")).status == 200


async def test_fields_are_seen_by_roles_in_the_space(scene: Scene) -> None:
    await scene.owner.push("spaces/one/plans/a", {"n": 1, "price": 2})
    assert (await scene.owner.pull("spaces/one/plans/a")).json["data"] == {"n": 1, "price": 2}
    seen = await scene.member.pull("spaces/one/plans/a")
    assert seen.json["data"] == {"n": 1}
    rejected = await scene.member.push("spaces/one/plans/a", {"n": 1, "price": 3}, seen.json["hash"])
    assert rejected.error == (403, 'Forbidden: field "price" requires roles: space:owner')


async def test_a_keyring_is_folded_for_members_of_its_own_space(scene: Scene) -> None:
    for space in ("one", "two"):
        await scene.store.put(f"spaces/{space}/_keyring", stored({"of": space}))
    folded = await scene.member.pull("spaces/one/plans/a?withKeyring=1")
    assert folded.json["keyring"]["data"] == {"of": "one"}
    linked = await scene.member.pull("links/one/two?withKeyring=1")
    assert linked.status == 200
    assert "keyring" not in linked.json


async def test_bundles_know_spaces(scene: Scene) -> None:
    assert (await scene.member.push("boards/one/cards", {"n": 1})).status == 200
    assert (await scene.stranger.push("boards/one/cards", {"n": 1})).status == 403
    assert (await scene.member.pull("boards/one")).json["collections"]["cards"]["data"] == {"n": 1}
    assert (await scene.stranger.pull("boards/one")).json["collections"] == {}


async def test_creator_of_a_space_owns_it(scene: Scene) -> None:
    key = "spaces/new/_access"
    for data in (access(OTHER), access(None), {}, {"members": [OWNER]}):
        assert (await scene.owner.push(key, data)).error == (403, "Forbidden")
    assert (await scene.anyone.push(key, access(OWNER))).status == 401
    assert (await scene.owner.push(key, access(OWNER), "0" * 64)).error == (403, "Forbidden")
    assert (await scene.owner.push("spaces/new/_keyring", access(OWNER))).error == (403, "Forbidden")
    assert (await scene.owner.request("POST", f"/push/{key}", b"{")).error == (403, "Forbidden")
    assert (await scene.owner.push(key, access(OWNER, MEMBER))).status == 200
    assert (await scene.member.pull(key)).status == 200
    assert (await scene.stranger.push(key, access(OTHER))).error == (403, "Forbidden")


async def test_of_two_creators_of_a_space_one_owns_it(scene: Scene) -> None:
    key, theirs = "spaces/new/_access", stored(access(OTHER))
    for base in (None, ""):
        release = asyncio.Event()
        arrived = scene.store.delay("put", release)
        pushing = asyncio.create_task(scene.owner.push(key, access(OWNER), base))
        await arrived.wait()
        await scene.store.put(key, theirs)
        release.set()
        assert (await pushing).error == (409, "hash_mismatch")
        found = await scene.store.get(key)
        assert isinstance(found, StoredObject)
        assert found.body == theirs
        await scene.store.delete(key)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"7", b'{"data":[]}', stored({"owner": 7, "members": [OWNER]})]
)
async def test_an_access_document_that_names_no_owner_lets_nobody_in(scene: Scene, text: bytes) -> None:
    key = "spaces/one/_access"
    await scene.store.put(key, text)
    for base in (None, ""):
        assert (await scene.owner.push(key, access(OWNER), base)).error == (403, "Forbidden")
    assert (await scene.owner.pull(key)).error == (403, "Forbidden")


async def test_a_failing_store_is_an_error_and_is_not_remembered(scene: Scene) -> None:
    key = "spaces/one/_access"
    assert (await scene.owner.pull(key)).status == 200
    for attempt in (scene.owner.pull(key), scene.owner.push(key, access(), "x")):
        scene.store.fail("get")
        assert (await attempt).error == (500, "Authorization error")
    assert (await scene.owner.pull(key)).status == 200


async def test_roles_that_take_too_long_are_unavailable(scene: Scene) -> None:
    assert (await scene.member.pull("spaces/one/plans/a")).status == 200
    arrived = scene.store.delay("get", asyncio.Event())
    with loop_time() as time:
        pulling = asyncio.ensure_future(scene.member.pull("spaces/one/plans/a"))
        await arrived.wait()
        time.now_s += ROLE_TIMEOUT_S
        late = await pulling
    assert late.error == (503, "Unauthorized")
    assert int(late.headers["Retry-After"]) >= 1


async def test_a_member_who_is_taken_off_is_out_at_once(scene: Scene) -> None:
    assert (await scene.member.pull("spaces/one/plans/a")).status == 200
    await scene.store.put("spaces/one/_access", stored(access(OWNER)))
    assert (await scene.member.pull("spaces/one/plans/a")).status == 403


async def test_without_spaces_nobody_holds_their_roles(start: Start, session: aiohttp.ClientSession) -> None:
    store = MemoryStore()
    await store.put("spaces/one/_access", stored(access(OWNER)))
    base = await start({"collections": [ACCESS]}, store=store)
    owner = Signed(base, session, ISSUER, root_device(ISSUER))
    assert (await owner.pull("spaces/one/_access")).error == (403, "Forbidden")
    assert (await owner.push("spaces/new/_access", access(OWNER))).error == (403, "Forbidden")


async def test_first_use_is_trusted_where_the_configuration_says_so(
    start: Start, session: aiohttp.ClientSession
) -> None:
    spaces = {"trustOnFirstUse": True, "accessPath": "rooms/{room}/access", "param": "room"}
    collection = {**ACCESS, "storagePath": "rooms/{room}/access"}
    base = await start({"auth": {"spaces": spaces}, "collections": [collection]})
    assert (await Browser(base, session).pull("rooms/new/access")).status == 401
    owner = Signed(base, session, ISSUER, root_device(ISSUER))
    assert (await owner.pull("rooms/new/access")).status == 200
    assert (await owner.push("rooms/new/access", access(OTHER))).status == 200
    assert (await owner.pull("rooms/new/access")).status == 403


BOTH = {"space:owner", "space:member"}


@pytest.mark.parametrize(
    ("document", "roles"),
    [
        (access(OWNER), BOTH),
        ({"data": access(OWNER)}, BOTH),
        (access(OTHER, OWNER), {"space:member"}),
        (access(OTHER, {"id": OWNER}, 7), set()),
        ({"owner": OTHER, "members": {OWNER: 1}}, set()),
        ({"owner": OTHER, "members": OWNER}, set()),
        ({"members": [OWNER]}, set()),
    ],
)
def test_roles_come_from_the_document_wrapped_or_bare(document: dict[str, Any], roles: set[str]) -> None:
    spaces = Spaces(Settings(), MemoryStore())
    for kept, given in ((json.dumps(document).encode(), roles), (None, set[str]())):
        membership = spaces.membership("spaces/one/_access", kept)
        assert membership is not None
        assert membership.roles(OWNER) == given


def test_whatever_byte_of_an_access_document_is_damaged_it_gives_nobody_a_role() -> None:
    found = Spaces(Settings(), MemoryStore())
    body = json.dumps({"data": access(OWNER, MEMBER), "baseHash": None}).encode()
    stored = _core.decode_push(body).stored(1)
    whole = found.membership("spaces/s/_access", stored)
    assert whole is not None
    assert whole.roles(MEMBER) == {"space:member"}
    for at in range(len(stored)):
        damaged = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        assert found.membership("spaces/s/_access", damaged) is None, damaged
