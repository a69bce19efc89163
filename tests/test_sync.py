"""A document kept in step: what is merged, what is repeated, and what is never lost."""

from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pysync._core import content_hash
from pysync.client import Client, SyncDocument, merge_remote_wins
from pysync.errors import Conflict, Forbidden


class Shelf:
    """A server of one document, which others write to: `meanwhile` holds what they push just before each of
    the coming pushes arrives."""

    def __init__(self, *meanwhile: dict[str, Any]) -> None:
        self.data: dict[str, Any] | None = None
        self.pushes = 0
        self._meanwhile = list(meanwhile)

    @property
    def hash(self) -> str:
        return "" if self.data is None else content_hash(orjson.dumps(self.data))

    async def pull(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.data or {}, "hash": self.hash, "timestamp": 1})

    async def push(self, request: web.Request) -> web.Response:
        self.pushes += 1
        if self._meanwhile:
            self.data = self._meanwhile.pop(0)
        body = await request.json()
        if (body["baseHash"] or "") != self.hash:
            return web.json_response({"error": "hash_mismatch", "currentHash": self.hash}, status=409)
        self.data = body["data"]
        return web.json_response({"hash": self.hash, "timestamp": 2})


class Desk:
    """A Shelf served, a client of it, and the waits that a SyncDocument asked for."""

    def __init__(self, *meanwhile: dict[str, Any]) -> None:
        self.shelf = Shelf(*meanwhile)
        self.waits: list[float] = []
        app = web.Application()
        app.router.add_get("/pull/doc", self.shelf.pull)
        app.router.add_post("/push/doc", self.shelf.push)
        self._server = TestServer(app)

    async def __aenter__(self) -> "Desk":
        await self._server.start_server()
        self._client = Client(str(self._server.make_url("/")))
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()
        await self._server.close()

    def document(self, **options: Any) -> SyncDocument:
        async def wait(seconds: float) -> None:
            self.waits.append(seconds)

        return SyncDocument(self._client, "doc", sleep=wait, chance=lambda: 0.5, **options)


@pytest.mark.parametrize(
    ("local", "remote", "merged"),
    [
        ({}, {}, {}),
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"a": 2}, {"a": 2}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1, "y": 1}}, {"a": {"y": 2, "z": 2}}, {"a": {"x": 1, "y": 2, "z": 2}}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({"a": 1}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"__proto__": 1, "a": {"constructor": 1, "b": 1}}, {"prototype": 1}, {"a": {"b": 1}}),
        ({"a": {}}, {"a": {"__class__": 1, "c": {"__dict__": 2}}}, {"a": {"c": {}}}),
        ({}, {"a": [{"__proto__": 1}]}, {"a": [{"__proto__": 1}]}),
    ],
)
def test_the_default_merge_is_deep_and_remote_wins(
    local: dict[str, Any], remote: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert merge_remote_wins(local, remote) == merged


async def test_the_first_pull_replaces_and_later_ones_resolve() -> None:
    async with Desk() as desk:
        document = desk.document()
        document.data = {"draft": True}
        desk.shelf.data = {"a": 1}
        assert await document.pull() == {"a": 1}
        document.data["mine"] = 1
        desk.shelf.data = {"a": 2}
        assert await document.pull() == {"a": 2, "mine": 1}


async def test_a_first_push_creates_and_the_next_builds_on_it() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"a": 1})
        result = await document.push({"a": 2})
        assert desk.shelf.data == {"a": 2}
        assert (document.data, document.hash) == ({"a": 2}, result.hash)
        assert desk.shelf.pushes == 2


async def test_a_document_pulled_as_missing_is_created() -> None:
    async with Desk() as desk:
        document = desk.document()
        assert await document.pull() == {}
        await document.push({"a": 1})
        assert desk.shelf.data == {"a": 1}


async def test_a_conflict_is_merged_and_pushed_again() -> None:
    async with Desk({"theirs": 1, "both": "theirs"}) as desk:
        document = desk.document()
        await document.push({"mine": 1, "both": "mine"})
        assert desk.shelf.data == {"theirs": 1, "mine": 1, "both": "theirs"}
        assert document.data == desk.shelf.data


async def test_waits_between_conflicts_double_and_stay_bounded() -> None:
    async with Desk(*({"n": n} for n in range(7))) as desk:
        await desk.document(retries=7).push({"mine": 1})
        assert desk.waits == pytest.approx([0.15, 0.25, 0.45, 0.85, 1.65, 2.05, 2.05])


async def test_a_push_that_keeps_losing_raises_and_a_later_one_still_overwrites_nothing() -> None:
    async with Desk(*({"n": n} for n in range(4))) as desk:
        document = desk.document()
        with pytest.raises(Conflict):
            await document.push({"mine": 1})
        assert desk.shelf.pushes == 4
        assert desk.shelf.data == {"n": 3}
        await document.push({"mine": 1})
        assert desk.shelf.data == {"n": 3, "mine": 1}


async def test_an_update_is_applied_to_what_is_there() -> None:
    async with Desk({"count": 5}, {"count": 6}) as desk:
        desk.shelf.data = {"count": 1}
        document = desk.document()
        await document.update(lambda data: {**data, "count": data.get("count", 0) + 1})
        assert desk.shelf.data == {"count": 7}


async def test_a_change_that_writes_into_its_argument_does_not_write_into_the_copy() -> None:
    async with Desk({"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}) as desk:
        desk.shelf.data = {"list": []}
        document = desk.document()

        def change(data: dict[str, Any]) -> dict[str, Any]:
            data.setdefault("list", []).append(1)
            return data

        with pytest.raises(Conflict):
            await document.update(change)
        assert document.data == {"list": []}


async def test_a_resolver_of_ones_own_decides() -> None:
    async with Desk({"a": "theirs"}) as desk:
        document = desk.document(resolve=lambda local, remote: {"both": [local, remote]})
        await document.push({"a": "mine"})
        assert desk.shelf.data == {"both": [{"a": "mine"}, {"a": "theirs"}]}


async def test_a_resolver_that_refuses_stops_the_push() -> None:
    def refuse(local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:
        raise Forbidden("mine or nothing")

    async with Desk({"a": "theirs"}) as desk:
        document = desk.document(resolve=refuse)
        with pytest.raises(Forbidden):
            await document.push({"a": "mine"})
        assert desk.shelf.data == {"a": "theirs"}
        assert document.hash == ""
