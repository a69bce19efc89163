"""Who hears of a write is who could pull it: roles, scopes, spaces, identities, restrictions, at random."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.change_pages import pages
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Reply, Signed, minted_at, root_device
from support.configurations import patient
from support.depth import depth
from support.sse_client import EventStream, listen

from pysync import config
from pysync.auth import issuing
from pysync.auth.issuing import Grant
from pysync.config.roles import SHARED
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on

USERS = (ISSUER.user_id, SUBJECT.user_id, STRANGER.user_id)
ADMIN = "t" * 32
WRITER = f"admin:{USERS[0]}"
LABEL = {"name": "mark", "storagePath": "mark/{n}", "readRoles": ["public"], "writeRoles": [WRITER]}
SPACES = {
    "name": "access", "storagePath": "spaces/{spaceId}/_access", "readRoles": ["space:member"],
    "writeRoles": [WRITER],
}  # fmt: skip


class AsAdmin(Browser):
    """Whoever runs the service."""

    async def request(
        self, method: str, target: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        return await super().request(method, target, body, self.headers(method, target, b""))

    def headers(self, method: str, target: str, body: bytes) -> dict[str, str]:
        return {"Authorization": f"Bearer {ADMIN}"}


Received = tuple[str, dict[str, str], str]
"""Collection, parameters and hash of a write."""


@dataclass(frozen=True)
class Write:
    """A push of something new to `key` of a collection, or, to an access document, of its members."""

    collection: int
    key: dict[str, str]
    members: tuple[str, ...]


def collections() -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.integers(0, 10**6), min_size=1, max_size=3).flatmap(
        lambda seeds: st.tuples(*(collection(f"c{number}") for number in range(len(seeds)))).map(list)
    )


def collection(name: str) -> st.SearchStrategy[dict[str, Any]]:
    path = st.sampled_from(["{id}", "{identity}/{id}", "{spaceId}/{id}", "{identity}/{spaceId}", "one"])
    role = st.sampled_from(
        [
            "public", "self", "admin", f"admin:{USERS[1]}", "extra", "device:root", "space:member",
            "space:owner", f"cap:read:{name}", f"delegated:{USERS[0]}:{name}", f"{SHARED}:{name}",
        ]
    )  # fmt: skip
    restriction = st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["deny", "allow"]),
            "identities": st.lists(st.sampled_from(USERS), min_size=1, unique=True),
            "actions": st.just(["pull"]),
        }
    )
    return st.fixed_dictionaries(
        {
            "name": st.just(name),
            "storagePath": path.map(lambda rest: f"{name}/{rest}"),
            "readRoles": st.lists(role, max_size=3, unique=True),
            "writeRoles": st.just([WRITER]),
        },
        optional={
            "requireAuth": st.just(False),
            "rootOnly": st.booleans(),
            "restrictions": st.lists(restriction, max_size=1),
            "appendOnly": st.just({"requireAuthorSignature": False}),
            "bundle": st.just(f"b{name}"),
            "pushOnly": st.booleans(),
            "fieldPermissions": st.just({"n": {"readRoles": ["extra"]}}),
        },
    ).map(_admissible)


def _admissible(members: dict[str, Any]) -> dict[str, Any]:
    """Without what a configuration refuses side by side."""
    if "{identity}" not in members["storagePath"]:
        members["readRoles"] = [role for role in members["readRoles"] if not role.startswith(SHARED)]
    for first, second in (("appendOnly", "bundle"), ("appendOnly", "fieldPermissions")):
        if first in members:
            members.pop(second, None)
    if "public" in members["readRoles"]:
        members.pop("rootOnly", None)
    return members


def writes(count: int) -> st.SearchStrategy[list[Write]]:
    values = {
        "id": st.sampled_from(["a", "b", "special"]),
        "identity": st.sampled_from(USERS),
        "spaceId": st.sampled_from(["s1", "s2"]),
    }
    write = st.builds(
        Write,
        st.integers(-1, count - 1),
        st.fixed_dictionaries(values),
        st.lists(st.sampled_from(USERS), max_size=2, unique=True).map(tuple),
    )
    return st.lists(write, min_size=1, max_size=8)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Any], list[Write], list[str]]:
    """A configuration, writes, and the paths of certificates."""
    found = draw(collections())
    rival = {**LABEL, "name": "rival", "storagePath": "c0/special", "pullOnly": True, "readRoles": ["extra"]}
    has_rival = found[0]["storagePath"] == "c0/{id}" and not found[0].keys() & {"appendOnly", "bundle"}
    extra = [rival] if has_rival and draw(st.booleans()) else []
    served = {"collections": [LABEL, SPACES, *extra, *found]}
    members: dict[str, Any] = served
    if draw(st.booleans()):
        members = {"namespaces": {"acme": served}}
    paths = draw(
        st.sampled_from(
            [["**"], ["c0/**", "mark/*"], ["**", "!c0/**"], ["c0/a", "c0/s1/**"], ["*/{identity}/*"]]
        )
    )
    return members, draw(writes(len(found))), paths


@pytest.mark.slow
@given(scenes())
@settings(max_examples=depth(20, 240))
def test_stream_delivers_exactly_what_its_caller_could_pull(
    scene: tuple[dict[str, Any], list[Write], list[str]],
) -> None:
    asyncio.run(_play(*scene))


@dataclass(frozen=True)
class Subscriber:
    """A stream of `caller`, of all collections or of `only` one."""

    caller: Browser
    stream: EventStream
    only: str | None = None

    async def received(self) -> list[Received]:
        """What comes before the next mark."""
        found: list[Received] = []
        while (data := (await self.stream.event()).data)["collection"] != "mark":
            found.append((data["collection"], data["params"], data["hash"]))
        return found


async def _play(members: dict[str, Any], writes: list[Write], paths: list[str]) -> None:
    auth = {"spaces": {}, "adminToken": ADMIN, "identityRoles": {USERS[2]: ["extra"]}}
    parsed = config.parse({"version": 1, "store": "memory:", "auth": auth, **patient(members)})
    prefix = "/acme" if "namespaces" in members else ""
    served = (members["namespaces"]["acme"] if prefix else members)["collections"]
    found = [each for each in served if each["name"].startswith("c")]
    shadowed = {"c0/special"} if len(served) > len(found) + 2 else set()
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(await create_app(parsed))
        base = f"http://127.0.0.1:{await stack.enter_async_context(serve_on(app))}"
        session = await stack.enter_async_context(aiohttp.ClientSession())
        writer = Signed(base, session, ISSUER, root_device(ISSUER))

        async def subscribe(caller: Browser, only: str | None) -> Subscriber:
            names = None if only is None else f"mark,{only}"
            stream = await listen(caller, f"{prefix}/events", collections=names)
            stack.push_async_callback(stream.close)
            assert stream.status == 200
            return Subscriber(caller, stream, only)

        callers = [Browser(base, session), AsAdmin(base, session), *_signers(base, session, paths)]
        subscribers = [await subscribe(caller, only) for caller in callers for only in (None, "c0")]
        for number, write in enumerate(writes):
            each = SPACES if write.collection < 0 else found[write.collection]
            path, received = await _push(writer, prefix, each, write, number)
            # Who misses members is told a version of its own.
            # A key that the rival reads may be one that `c0` itself only pushes to.
            source = {} if path in shadowed else each
            readers = {id(caller): await _pulled(caller, prefix, source, path) for caller in callers}
            await _push(writer, prefix, LABEL, Write(0, {"n": str(number)}, ()), number)
            name, params = received
            if path in shadowed:
                name, params = "rival", {}
            for subscriber in subscribers:
                hash_ = readers[id(subscriber.caller)]
                is_delivered = hash_ is not None and subscriber.only in (None, name)
                expected = [(name, params, hash_)] if is_delivered else []
                assert await subscriber.received() == expected, (subscriber.caller, each, path)
                assert await _changed(subscriber, prefix, name, params) == expected


def _signers(base: str, session: aiohttp.ClientSession, paths: list[str]) -> list[Browser]:
    limited = Grant(("read", "write"), tuple(paths))
    blind = Grant(("write",), ("**",))
    guest = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "c0", grant=Grant(("read",), (*paths, "!c0/_members")),
        **minted_at(),
    )  # fmt: skip
    return [
        Signed(base, session, ISSUER, root_device(ISSUER, collections=("c0", "c1"))),
        Signed(base, session, STRANGER, root_device(STRANGER, grant=limited)),
        Signed(base, session, STRANGER, root_device(STRANGER, grant=blind)),
        Signed(base, session, SUBJECT, guest),
    ]


async def _changed(subscriber: Subscriber, prefix: str, name: str, params: dict[str, str]) -> list[Received]:
    """What all pages of changes have of a document."""
    names = {} if subscriber.only is None else {"collections": f"mark,{subscriber.only}"}
    found = (await pages(subscriber.caller, path=f"{prefix}/changes", limit=3, **names)).changes
    return [
        (each["collection"], each["params"], each["hash"])
        for each in found
        if (each["collection"], each["params"]) == (name, params)
    ]


async def _push(
    writer: Browser, prefix: str, each: dict[str, Any], write: Write, number: int
) -> tuple[str, tuple[str, dict[str, str]]]:
    """Write, and return the path, and the collection and parameters to be told of."""
    parts = each["storagePath"].split("/")
    params = {part[1:-1]: write.key[part[1:-1]] for part in parts if part.startswith("{")}
    path = "/".join(params.get(part[1:-1], part) for part in parts)
    key = f"{path}/{each['name']}" if "bundle" in each else path
    body: dict[str, Any] = {"data": {"n": number}}
    if each is SPACES:
        body["data"] |= {"owner": "nobody", "members": list(write.members)}
    reply = await writer.request("POST", f"{prefix}/push/{key}", body)
    if reply.status == 409:
        body["baseHash"] = reply.json["currentHash"]
        reply = await writer.request("POST", f"{prefix}/push/{key}", body)
    assert reply.status == 200, (reply.body, each)
    return path, (each["name"], params)


async def _pulled(caller: Browser, prefix: str, each: dict[str, Any], key: str) -> str | None:
    """The version of the document at `key` that the caller gets to see; None where that is none."""
    if each.get("pushOnly"):
        return None
    target = f"{prefix}/pull/{key}" + ("?last=1" if "appendOnly" in each else "")
    reply = await caller.request("GET", target)
    assert reply.status in (200, 401, 403), (reply.status, reply.body)
    found = reply.json if reply.status == 200 else {}
    if "bundle" in each:
        found = found.get("collections", {}).get(each["name"], {})
    hash_: str | None = found.get("hash")
    return hash_
