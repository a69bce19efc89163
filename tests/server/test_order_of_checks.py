"""One order of checks on every route: signature, revocation, rate limit, roles, nonce."""

from typing import NamedTuple

import aiohttp
import orjson
import pytest
from support.clients import STRANGER, SUBJECT, Browser, Reply, Signed, Start, root_device
from support.collections import OWN, UNSIGNED, collection, limit_of

from pysync.auth import issuing

LIMIT = {"rateLimit": {action: limit_of(2) for action in ("pull", "push", "list")}}
COLLECTIONS = [
    collection("doc", "doc/{identity}/{id}", **OWN, listable=True, deletable=True, history={"versions": 3}),
    collection("log", "log/{identity}/{id}", **OWN, appendOnly=UNSIGNED),
    collection("file", "file/{identity}/{id}", **OWN, allowedMimeTypes=["image/png"]),
    collection("part", "part/{identity}", **OWN, bundle="all"),
]


class Route(NamedTuple):
    """A request to a path of an identity. A body of bytes is a file, which the signature does not cover."""

    method: str
    target: str
    body: object = None

    async def send(self, caller: Signed, identity: str, times: int = 1) -> list[int]:
        """Send one signed request so many times, and return the statuses."""
        target, body, kind = self.target.replace("ME", identity), b"", {}
        if isinstance(self.body, bytes):
            body, signed, kind = self.body, b"", {"Content-Type": "image/png"}
        elif self.body is not None:
            body = signed = orjson.dumps(self.body)
        else:
            signed = b""
        headers = {**caller.headers(self.method, target, signed), **kind}
        caller.tamper(headers)
        anybody = Browser(caller.base, caller.session)
        sent = None if self.body is None else body
        answers = [await anybody.request(self.method, target, sent, headers) for _ in range(times)]
        return [answer.status for answer in answers]


SINGLE = {
    "pull": Route("GET", "/pull/doc/ME/a"),
    "head": Route("HEAD", "/pull/doc/ME/a"),
    "push": Route("POST", "/push/doc/ME/a", {"data": {}, "baseHash": None}),
    "list": Route("GET", "/list/doc/ME"),
    "delete": Route("DELETE", "/push/doc/ME/a?baseHash="),
    "history": Route("GET", "/history/doc/ME/a"),
    "append": Route("POST", "/push/log/ME/a", {"data": {}}),
    "tail": Route("GET", "/pull/log/ME/a?last=1"),
    "file push": Route("POST", "/push/file/ME/a", b"png"),
    "file pull": Route("GET", "/pull/file/ME/a"),
    "events": Route("HEAD", '/events?collections=doc&params={"doc":{"identity":"ME"}}'),
    "changes": Route("GET", '/changes?collections=doc&params={"doc":{"identity":"ME"}}'),
}
EVERY = {**SINGLE, "bundle": Route("GET", "/pull/part/ME")}
each_route = pytest.mark.parametrize("route", EVERY.values(), ids=EVERY.keys())
each_single_route = pytest.mark.parametrize("route", SINGLE.values(), ids=SINGLE.keys())
ME, OTHER = SUBJECT.user_id, STRANGER.user_id


def forged(headers: dict[str, str]) -> None:
    signature = headers["X-Starfish-Sig"]
    headers["X-Starfish-Sig"] = ("B" if signature[0] == "A" else "A") + signature[1:]


@pytest.fixture
async def caller(start: Start, session: aiohttp.ClientSession) -> Signed:
    limited = [{**each, **LIMIT} for each in COLLECTIONS]
    return Signed(await start({"collections": limited}), session, SUBJECT, root_device(SUBJECT))


async def revoke(caller: Signed) -> Reply:
    text = issuing.issue_revocation_list(SUBJECT, 1, certificates=[caller.certificate]).text
    return await Browser(caller.base, caller.session).request("POST", "/revocations", text)


@each_route
async def test_allowed_request_is_accepted_once(caller: Signed, route: Route) -> None:
    first, second = await route.send(caller, ME, times=2)
    assert first in (200, 204, 409)
    assert second == 401


@each_single_route
async def test_request_without_the_role_may_be_sent_again(caller: Signed, route: Route) -> None:
    assert await route.send(caller, OTHER, times=2) == [403, 403]


@each_single_route
async def test_rate_limit_comes_before_roles(caller: Signed, route: Route) -> None:
    # A stream, or a page of changes, that delivers nothing is a pull of nothing.
    limited = 403 if "params=" in route.target else 429
    assert await route.send(caller, OTHER, times=3) == [403, 403, limited]


@each_route
async def test_rejected_signature_takes_no_place_in_the_rate_limit(caller: Signed, route: Route) -> None:
    genuine, caller.tamper = caller.tamper, forged
    assert await route.send(caller, ME, times=3) == [401] * 3
    caller.tamper = genuine
    assert await route.send(caller, ME) != [429]


@each_route
async def test_wrong_signature_is_rejected_before_a_limit_that_is_reached(
    caller: Signed, route: Route
) -> None:
    statuses = [(await route.send(caller, ME))[0] for _ in range(3)]
    assert statuses[-1] == 429
    caller.tamper = forged
    assert await route.send(caller, ME) == [401]


@each_route
async def test_revoked_certificate_is_rejected_before_rate_limit_and_roles(
    caller: Signed, route: Route
) -> None:
    assert (await revoke(caller)).status == 200
    assert [(await route.send(caller, identity))[0] for identity in (ME, OTHER, ME)] == [401] * 3


async def test_batch_without_an_allowed_entry_takes_no_nonce(
    start: Start, session: aiohttp.ClientSession
) -> None:
    caller = Signed(await start({"collections": COLLECTIONS}), session, SUBJECT, root_device(SUBJECT))

    async def send(identity: str) -> list[str | None]:
        """Send one signed batch twice, and return the errors of its entry."""
        entry = f'{{"identity":"{identity}","id":"a"}}'
        target = f'/batch/pull?collections=doc&params={{"doc":[{entry}]}}'
        headers, anybody = caller.headers("GET", target, b""), Browser(caller.base, caller.session)
        answers = [await anybody.request("GET", target, headers=headers) for _ in range(2)]
        return [answer.json["collections"]["doc"][0].get("error") for answer in answers]

    assert await send(OTHER) == ["Forbidden", "Forbidden"]
    assert await send(ME) == [None, "Forbidden"], "a replay is anonymous"
