"""Refusing strangers costs little: nothing that they send is looked at before they have signed it."""

from urllib.parse import quote

import aiohttp
import orjson
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, encoded, minted_at, root_device
from support.collections import MINE, OWN, UNSIGNED, collection

from pysync.auth import issuing
from pysync.auth.certificates import Certificate
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.plugins import PluginRequest
from pysync.store import NotModified, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

LOG = collection("log", "logs/{identity}/{id}", appendOnly=UNSIGNED, **OWN)
PART = {**MINE, "name": "part", "storagePath": "b/{identity}", "bundle": "all"}
KEY = f"u/{STRANGER.user_id}/a"
KEYS = quote(orjson.dumps({"mine": [{"id": f"n{n}"} for n in range(100)]}))


class Validator:
    """A plugin that is asked about certificates, and counts how often."""

    name = "validator"

    def __init__(self) -> None:
        self.cap_validators = {"device": self._validate}
        self.queries = 0

    def _validate(self, certificate: Certificate) -> None:
        self.queries += 1


def unsigned(headers: dict[str, str]) -> None:
    """Spoil a signature, its form left as it is."""
    signature = headers["X-Starfish-Sig"]
    headers["X-Starfish-Sig"] = ("B" if signature[0] == "A" else "A") + signature[1:]


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        ("GET", f"/pull/{KEY}", None, 401),
        ("POST", f"/push/{KEY}", {"data": {}, "baseHash": None}, 401),
        ("POST", f"/push/logs/{STRANGER.user_id}/a", {"data": {}}, 401),
        ("GET", f"/pull/logs/{STRANGER.user_id}/a?last=1", None, 401),
        ("GET", f"/list/u/{STRANGER.user_id}", None, 401),
        ("GET", "/events?collections=mine", None, 401),
        ("GET", "/changes?collections=mine", None, 401),
        ("GET", f"/batch/pull?collections=mine&params={KEYS}", None, 200),
    ],
)
async def test_certificate_is_looked_at_only_after_the_request_signature_holds(
    start: Start, session: aiohttp.ClientSession, method: str, target: str, body: object, status: int
) -> None:
    validator = Validator()
    base = await start({"collections": [{**MINE, "listable": True}, LOG]}, plugins=[validator])
    caller = Signed(base, session, STRANGER, root_device(STRANGER), tamper=unsigned)
    assert (await caller.request(method, target, body)).status == status
    assert validator.queries == 0
    caller.tamper = lambda headers: None
    assert (await caller.pull(KEY)).status == 200
    assert validator.queries == 1


async def test_a_forged_certificate_is_not_looked_at(start: Start, session: aiohttp.ClientSession) -> None:
    validator = Validator()
    base = await start({"collections": [MINE]}, plugins=[validator])
    certificate = root_device(STRANGER, collections=tuple(f"c{n}" for n in range(700)))
    forged = encoded({**orjson.loads(certificate.text), "exp": certificate.exp + 1})
    caller = Signed(base, session, STRANGER, certificate)
    caller.tamper = lambda headers: headers.update(Authorization=forged)
    assert (await caller.pull(KEY)).status == 401
    assert validator.queries == 0


async def test_certificate_is_kept_once_its_request_is_accepted(
    start: Start, session: aiohttp.ClientSession
) -> None:
    validator = Validator()
    base = await start({"collections": [MINE]}, plugins=[validator])
    caller = Signed(base, session, STRANGER, root_device(STRANGER))
    queries = []
    for key, status in (("u/somebody/a", 403), ("u/somebody/b", 403), (KEY, 200), (KEY, 200)):
        assert (await caller.pull(key)).status == status
        queries.append(validator.queries)
    assert queries == [1, 2, 3, 3]


async def test_a_batch_whose_signature_does_not_hold_is_anybodys(
    start: Start, session: aiohttp.ClientSession
) -> None:
    open_to_all = {
        "name": "open",
        "storagePath": "open/{id}",
        "readRoles": ["public"],
        "writeRoles": ["public"],
    }
    base = await start({"collections": [MINE, open_to_all]})
    assert (await Browser(base, session).push("open/a", {"n": 1})).status == 200
    caller = Signed(base, session, STRANGER, root_device(STRANGER), tamper=unsigned)
    params = quote(orjson.dumps({"mine": [{"identity": STRANGER.user_id, "id": "a"}], "open": [{"id": "a"}]}))
    answer = await caller.request("GET", f"/batch/pull?collections=mine,open&params={params}")
    (mine,), (found,) = (answer.json["collections"][name] for name in ("mine", "open"))
    assert mine["error"] == "Forbidden"
    assert found["data"] == {"n": 1}


async def test_rejected_request_takes_no_replay_memory_and_an_accepted_one_does(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({"collections": [MINE, LOG]}, coordinator=MemoryCoordinator(max_live_nonces=8))
    own = {"identity": STRANGER.user_id, "id": "a"}
    narrow = issuing.Grant(("read",), (f"u/{STRANGER.user_id}/*", f"!{KEY}"))
    for grant, target in (
        (issuing.FULL_ACCESS, "/pull/u/somebody/a"),
        (issuing.FULL_ACCESS, "/list/u/somebody"),
        (issuing.FULL_ACCESS, "/pull/logs/somebody/a?last=1"),
        (narrow, f"/pull/{KEY}"),
        (narrow, f"/batch/pull?collections=mine&params={quote(orjson.dumps({'mine': [{'id': 'a'}]}))}"),
        (narrow, f"/events?collections=log&params={quote(orjson.dumps({'log': own}))}"),
        (narrow, f"/changes?collections=log&params={quote(orjson.dumps({'log': own}))}"),
    ):
        caller = Signed(base, session, STRANGER, root_device(STRANGER, grant=grant))
        statuses = {(await caller.request("GET", target)).status for _ in range(10)}
        assert statuses <= {200, 403, 404}, target
    owner = Signed(base, session, STRANGER, root_device(STRANGER))
    assert [(await owner.pull(KEY)).status for _ in range(7)] == [200] * 6 + [503]


async def test_owners_are_served_after_unknown_identities_filled_their_share_of_memory(
    start: Start, session: aiohttp.ClientSession
) -> None:
    members = {"collections": [MINE], "auth": {"trustedIssuers": [ISSUER.ed_pub]}}
    base = await start(members, coordinator=MemoryCoordinator(max_live_nonces=16))
    stranger, owner, trusted = (
        Signed(base, session, keys, root_device(keys)) for keys in (STRANGER, SUBJECT, ISSUER)
    )
    assert (await owner.push(f"u/{SUBJECT.user_id}/a", {"n": 1})).status == 200
    statuses = [(await stranger.pull(KEY)).status for _ in range(13)]
    assert statuses == [200] * 11 + [503] * 2
    anyone = Browser(base, session)
    assert (await owner.pull(f"u/{SUBJECT.user_id}/a")).status == 200
    assert (await anyone.request("GET", "/health/ready")).status == 200
    assert (await owner.pull(f"u/{SUBJECT.user_id}/a")).status == 503
    assert (await trusted.pull(f"u/{ISSUER.user_id}/a")).status == 200


async def test_bearer_of_an_audience_certificate_for_anybody_has_unknown_standing(
    start: Start, session: aiohttp.ClientSession
) -> None:
    shared = {
        "name": "shared",
        "storagePath": "shared/{id}",
        "readRoles": ["cap:read:shared"],
        "pullOnly": True,
    }
    members = {"collections": [shared], "auth": {"trustedIssuers": [ISSUER.ed_pub]}}
    base = await start(members, coordinator=MemoryCoordinator(max_live_nonces=8))
    grant = issuing.Grant(("read",), ("shared/**", "!shared/_members"))
    link = issuing.issue_audience_certificate(ISSUER, "shared", grant=grant, **minted_at())
    named = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "shared", grant=grant, **minted_at()
    )
    anybody = Signed(base, session, STRANGER, link, presenter=True)
    assert [(await anybody.pull("shared/a")).status for _ in range(7)] == [200] * 6 + [503]
    assert (await Signed(base, session, SUBJECT, named).pull("shared/a")).status == 200


async def test_a_certificate_that_expires_while_its_request_is_served_is_rejected(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """A step before the nonce may take long: here reading the access document of the space."""
    clock = FakeClock(wall_clock_ms())

    class Slow(MemoryStore):
        async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
            clock.now_ms += 40_000
            return await super().get(key, if_none_match)

    plans = {"name": "plans", "storagePath": "spaces/{spaceId}/{id}", "readRoles": ["space:member", "public"]}
    members = {"collections": [{**plans, "requireAuth": True, "pullOnly": True}], "auth": {"spaces": {}}}
    base = await start(members, store=Slow(), now_ms=clock)
    for lasts_s, status in ((0, 200), (-280, 401)):
        now_ms = clock()
        until_s = now_ms // 1000 + lasts_s
        certificate = issuing.issue_device_certificate(
            STRANGER, STRANGER.ed_pub, STRANGER.kem_pub, now_s=until_s - 30 * 86_400, nonce=bytes(16)
        )
        assert certificate.exp == until_s
        caller = Signed(base, session, STRANGER, certificate, ts_ms=now_ms)
        assert (await caller.pull("spaces/s/a")).status == status


async def test_readiness_fails_where_signed_requests_do(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start({"collections": [MINE]}, coordinator=MemoryCoordinator(max_live_nonces=8))
    owner = Signed(base, session, STRANGER, root_device(STRANGER))
    assert (await owner.push(KEY, {"n": 1})).status == 200
    assert [(await owner.pull(KEY)).status for _ in range(7)] == [200] * 6 + [503]
    assert (await Browser(base, session).request("GET", "/health/ready")).status == 503


async def test_replay_of_an_allowed_request_is_rejected_on_every_route(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({"collections": [{**MINE, "listable": True}, LOG, PART]})
    nonces = iter(bytes([n]) * 16 for n in range(1, 100))
    for method, target, body in (
        ("POST", f"/push/{KEY}", {"data": {}, "baseHash": None}),
        ("GET", f"/pull/{KEY}", None),
        ("GET", f"/list/u/{STRANGER.user_id}", None),
        ("POST", f"/push/logs/{STRANGER.user_id}/a", {"data": {}}),
        ("GET", f"/pull/logs/{STRANGER.user_id}/a?last=1", None),
        ("GET", f"/pull/b/{STRANGER.user_id}", None),
        ("HEAD", "/events?collections=mine", None),
    ):
        certificate = root_device(STRANGER)
        caller = Signed(base, session, STRANGER, certificate, ts_ms=wall_clock_ms(), nonce=next(nonces))
        assert (await caller.request(method, target, body)).status == 200
        assert (await caller.request(method, target, body)).status == 401, target


async def test_a_replayed_batch_is_anybodys(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start({"collections": [MINE]})
    caller = Signed(base, session, STRANGER, root_device(STRANGER), ts_ms=wall_clock_ms(), nonce=b"n" * 16)
    params = quote(orjson.dumps({"mine": [{"identity": STRANGER.user_id, "id": "a"}]}))
    answers = [await caller.request("GET", f"/batch/pull?collections=mine&params={params}") for _ in range(2)]
    first, second = (answer.json["collections"]["mine"][0] for answer in answers)
    assert "error" not in first
    assert second["error"] == "Forbidden"


class Watcher:
    """A plugin that notes what is about to be read."""

    name = "watcher"

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def before_pull(self, request: PluginRequest) -> None:
        self.seen.append(request.key)


@pytest.mark.parametrize(
    ("target", "key"),
    [
        (f"/pull/{KEY}", KEY),
        (f"/pull/b/{STRANGER.user_id}", f"b/{STRANGER.user_id}/part"),
        (f"/batch/pull?collections=mine&params={quote(orjson.dumps({'mine': [{'id': 'a'}]}))}", KEY),
    ],
)
async def test_plugin_is_not_notified_of_a_replayed_pull(
    start: Start, session: aiohttp.ClientSession, target: str, key: str
) -> None:
    watcher = Watcher()
    base = await start({"collections": [MINE, PART]}, plugins=[watcher])
    caller = Signed(base, session, STRANGER, root_device(STRANGER), ts_ms=wall_clock_ms(), nonce=b"n" * 16)
    for _ in range(2):
        await caller.request("GET", target)
        assert watcher.seen == [key]
