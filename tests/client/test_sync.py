"""A document kept in step: what is merged, what is repeated, and what is never lost."""

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pysync._core import content_hash
from pysync.client import Client, Dropped, RetryPolicy, SyncDocument, UnknownBase, merge_remote_wins
from pysync.errors import Conflict, Forbidden, Unavailable


class Shelf:
    """A server of one document, which others write to: `meanwhile` holds what they push just before each of
    the coming pushes arrives."""

    def __init__(self, *meanwhile: dict[str, Any]) -> None:
        self.data: dict[str, Any] | None = None
        self.pushes = 0
        self.is_away = False
        self.before_push: Callable[[], None] = lambda: None
        self._meanwhile = list(meanwhile)

    @property
    def hash(self) -> str:
        return "" if self.data is None else content_hash(orjson.dumps(self.data))

    async def pull(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.data or {}, "hash": self.hash, "timestamp": 1})

    async def push(self, request: web.Request) -> web.Response:
        self.pushes += 1
        if self.is_away:
            return web.json_response({"error": "store_unavailable"}, status=503)
        self.before_push()
        self.before_push = lambda: None
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
        self._client = Client(str(self._server.make_url("/")), backoff=RetryPolicy(attempts=1))
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()
        await self._server.close()

    def document(self, **options: Any) -> SyncDocument:
        async def wait(seconds: float) -> None:
            self.waits.append(seconds)

        return SyncDocument(self._client, "doc", sleep=wait, jitter=lambda: 0.5, **options)


async def test_a_pull_takes_what_is_there_and_keeps_what_was_edited_here() -> None:
    async with Desk() as desk:
        document = desk.document()
        desk.shelf.data = {"a": 1, "gone": 1}
        assert await document.pull() == {"a": 1, "gone": 1}
        document.data["mine"] = 1
        assert document.is_edited
        desk.shelf.data = {"a": 2}
        assert await document.pull() == {"a": 2, "mine": 1}
        assert document.is_edited
        await document.push()
        assert desk.shelf.data == {"a": 2, "mine": 1}
        assert not document.is_edited


async def test_edit_before_the_first_pull_is_kept() -> None:
    async with Desk() as desk:
        document = desk.document()
        document.data = {"draft": True}
        desk.shelf.data = {"a": 1}
        assert await document.pull() == {"a": 1, "draft": True}
        assert document.is_edited


async def test_a_pull_of_the_version_that_is_here_leaves_the_edits_as_they_are() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"a": [1]})
        edited = document.data
        edited["a"].append(2)
        await document.pull()
        assert document.data is edited
        assert document.data == {"a": [1, 2]}


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
        assert desk.shelf.data == {"theirs": 1, "mine": 1, "both": "mine"}
        assert document.data == desk.shelf.data
        assert [*document.dropped] == [Dropped(("both",), "theirs", local=False)]


async def test_a_push_after_a_conflict_stores_what_was_pushed() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"items": ["a"], "title": "x", "rows": [{"id": 1, "n": 1}]})
        desk.shelf.data = {"items": ["a", "b"], "title": "x", "rows": [{"id": 1, "n": 2}, {"id": 2}]}
        await document.push(
            {"items": ["a", "mine"], "title": "offline", "rows": [{"id": 1, "n": 1}, {"id": 3}]}
        )
        rows = [{"id": 1, "n": 2}, {"id": 2}, {"id": 3}]
        assert desk.shelf.data == {"items": ["a", "mine"], "title": "offline", "rows": rows}
        assert [*document.dropped] == [Dropped(("items",), ["a", "b"], local=False)]
        document.dropped.clear()
        await document.push({**document.data, "title": "on"})
        assert not document.dropped


async def test_the_merge_of_the_protocol_is_there_by_name_and_reports_its_drops() -> None:
    async with Desk({"theirs": 1, "both": "theirs"}) as desk:
        document = desk.document(resolve=merge_remote_wins)
        await document.push({"mine": 1, "both": "mine"})
        assert desk.shelf.data == {"theirs": 1, "mine": 1, "both": "theirs"}
        assert [*document.dropped] == [Dropped(("both",), "mine", local=True)]


async def test_a_rule_of_ones_own_decides_about_conflicts() -> None:
    async with Desk({"n": 5, "theirs": 1}) as desk:
        document = desk.document(on_conflict=lambda conflict: max(conflict.local, conflict.remote))
        await document.push({"n": 3, "mine": 1})
        assert desk.shelf.data == {"n": 5, "theirs": 1, "mine": 1}


async def test_entries_are_distinguished_by_the_named_member() -> None:
    async with Desk({"tags": [{"name": "theirs"}]}) as desk:
        await desk.document(id_member="name").push({"tags": [{"name": "mine"}]})
        assert desk.shelf.data == {"tags": [{"name": "theirs"}, {"name": "mine"}]}


async def test_an_edit_survives_a_restart_and_is_merged_with_what_others_wrote() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"title": "x", "rows": [{"id": 1}]})
        document.data["title"] = "offline"
        document.data["rows"].append({"id": 2})
        state = json.loads(json.dumps(document.dump()))
        document.data["title"] = "not in what was dumped"

        desk.shelf.data = {"title": "x", "rows": [{"id": 1}, {"id": 3}], "by": "them"}
        restored = desk.document()
        restored.restore(state)
        assert restored.is_edited
        await restored.pull()
        rows = [{"id": 1}, {"id": 3}, {"id": 2}]
        assert restored.data == {"title": "offline", "rows": rows, "by": "them"}
        await restored.push()
        assert desk.shelf.data == restored.data


async def test_a_push_that_did_not_get_through_is_restored_as_an_edit() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"a": 1, "b": 1})
        desk.shelf.is_away = True
        with pytest.raises(Unavailable):
            await document.push({"a": 2, "b": 1})
        assert document.is_edited
        state = document.dump()
        desk.shelf.is_away = False
        desk.shelf.data = {"a": 1, "b": 2}
        restored = desk.document()
        restored.restore(state)
        await restored.push()
        assert desk.shelf.data == {"a": 2, "b": 2}


async def test_document_never_pushed_or_pulled_survives_a_restart() -> None:
    async with Desk({"theirs": 1}) as desk:
        document = desk.document()
        document.data = {"mine": 1}
        restored = desk.document()
        restored.restore(document.dump())
        await restored.push()
        assert desk.shelf.data == {"theirs": 1, "mine": 1}


async def test_an_edit_that_began_from_the_version_of_the_server_is_kept_without_a_base() -> None:
    async with Desk() as desk:
        await desk.document().push({"a": 1})
        document = desk.document()
        document.data, document.hash = {"a": 2}, desk.shelf.hash
        assert await document.pull() == {"a": 2}
        desk.shelf.data = {"a": 1, "theirs": 1}
        await document.push()
        assert desk.shelf.data == {"a": 2, "theirs": 1}


async def test_a_hash_alone_that_is_set_by_hand_is_no_edit() -> None:
    async with Desk() as desk:
        await desk.document().push({"a": 1})
        document = desk.document()
        document.hash = desk.shelf.hash
        assert await document.pull() == {"a": 1}
        other = desk.document()
        other.hash = "0" * 64
        assert await other.pull() == {"a": 1}


async def test_an_edit_of_an_unknown_version_is_rejected_rather_than_discarded() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"items": ["a"], "title": "x"})
        saved = document.hash
        desk.shelf.data = theirs = {"items": ["a", "b"], "title": "x"}

        mine = {"items": ["a", "mine"], "title": "offline title"}
        restored = desk.document()
        restored.data, restored.hash = mine, saved
        for act in (restored.pull, restored.push, lambda: restored.update(lambda data: data)):
            with pytest.raises(UnknownBase, match="dump") as rejected:
                await act()
            assert rejected.value.current_hash == desk.shelf.hash
            assert (restored.data, restored.hash) == (mine, saved)
            assert desk.shelf.data == theirs

        again = desk.document()
        again.restore(json.loads(json.dumps(restored.dump())))
        with pytest.raises(UnknownBase):
            await again.pull()
        by_resolver = desk.document(resolve=lambda local, remote: {"both": [local, remote]})
        by_resolver.restore(restored.dump())
        assert await by_resolver.pull() == {"both": [mine, theirs]}


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"key": "other"}, {"data": None}, {"hash": None}, {"base": []}],
)
async def test_a_state_that_is_none_of_this_document_is_not_restored(change: dict[str, Any]) -> None:
    async with Desk() as desk:
        document = desk.document()
        with pytest.raises(ValueError, match=r"^this (state )?is "):
            document.restore({**document.dump(), **change})


async def test_edit_during_a_push_stays() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"a": 1, "b": 1})
        document.data["a"] = 2

        def edit() -> None:
            document.data["b"] = 2
            desk.shelf.data = {"a": 1, "b": 1, "theirs": 1}

        desk.shelf.before_push = edit
        await document.push()
        assert desk.shelf.data == {"a": 2, "b": 1, "theirs": 1}
        assert document.data == {"a": 2, "b": 2, "theirs": 1}
        assert document.is_edited
        await document.push()
        assert desk.shelf.data == document.data


async def test_an_update_on_a_conflict_keeps_what_was_edited_before() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"a": 1, "count": 0})
        document.data["a"] = 2
        desk.shelf.data = {"a": 1, "count": 5}
        await document.update(lambda data: {**data, "count": data["count"] + 1})
        assert desk.shelf.data == {"a": 2, "count": 6}
        assert not document.is_edited


async def test_an_update_that_fails_changes_nothing_here() -> None:
    async with Desk() as desk:
        document = desk.document()
        await document.push({"a": 1})
        desk.shelf.is_away = True
        with pytest.raises(Unavailable):
            await document.update(lambda data: {"a": 2})
        assert document.data == {"a": 1}
        assert not document.is_edited


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


async def test_a_resolver_that_rejects_stops_the_push() -> None:
    def reject(local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:
        raise Forbidden("mine or nothing")

    async with Desk({"a": "theirs"}) as desk:
        document = desk.document(resolve=reject)
        with pytest.raises(Forbidden):
            await document.push({"a": "mine"})
        assert desk.shelf.data == {"a": "theirs"}
        assert document.hash == ""
