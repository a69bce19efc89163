"""A running service takes another configuration: all of it, or nothing."""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
from support.clients import STRANGER, SUBJECT, Browser, Signed, root_device
from support.collections import LOG, MINE, NOTES, OWN, collection, limit_of
from support.configurations import patient
from support.plugin_samples import NotifiedPlugin
from support.reloads import follow
from support.sse_client import Listen

from pysync import config
from pysync.config import Config, ConfigError
from pysync.config.changes import changes
from pysync.config.collection import wire_name
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import ReloadRefused
from pysync.plugins import FileBackedCollection
from pysync.server.app import App, create_app
from pysync.server.process.reload import Reloads, WorkerReloads
from pysync.server.process.serve import serve_on
from pysync.server.process.worker import Apply, Prepare, Reply, connect
from pysync.store import Write
from pysync.store.local.store import LocalStore
from pysync.testing import FakeClock

ADMIN = "0123456789abcdef"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}


class Reloaded:
    """A service in this process and, with `reload`, another configuration for it."""

    def __init__(self, app: App, base: str, session: aiohttp.ClientSession) -> None:
        self.app = app
        self.browser = Browser(base, session)

    def signed(self, keys: Any = SUBJECT) -> Signed:
        return Signed(self.browser.base, self.browser.session, keys, root_device(keys))

    async def reload(self, *collections: dict[str, Any], **members: Any) -> None:
        await self.app.apply(self.app.prepare(parsed(*collections, **members)))


def parsed(*collections: dict[str, Any], **members: Any) -> Config:
    value = {"version": 1, "store": "memory:", "collections": list(collections), **members}
    return config.parse(patient(value))


@asynccontextmanager
async def running(
    session: aiohttp.ClientSession, *collections: dict[str, Any], options: Any = None, **members: Any
) -> AsyncIterator[Reloaded]:
    app = await create_app(parsed(*collections, **members), **(options or {}))
    async with app, serve_on(app) as port:
        yield Reloaded(app, f"http://127.0.0.1:{port}", session)


# Which members


EVERYTHING: dict[str, Any] = {
    "store": {"url": "memory:", "endpoint": "http://127.0.0.1:1", "region": "r"},
    "coordinator": "memory:",
    "server": {"admin": {"port": 1}, "cors": {"origins": ["*"]}, "examples": "."},
    "auth": {"adminToken": ADMIN, "trustedIssuers": [], "spaces": {}},
    "configEndpoint": {"auth": "public"},
    "rateLimit": {"push": limit_of(9, identity=limit_of(9), ip=limit_of(9))},
    "restrictions": [{"mode": "deny", "identities": ["x"]}],
    "quotas": {kind: {"bytes": 9} for kind in ("identity", "space", "namespace")},
    "backup": {"to": "file:/nowhere"},
    "collections": [collection("events", "events/{id}"), NOTES, collection("list", "lists/{id}")],
    "namespaces": {"team": {"collections": [NOTES]}},
    "projections": [{"source": "notes", "target": "lists/all", "id": "{id}"}],
    "events": [{"collection": "events", "storagePath": "e/{id}"}],
}
"""A configuration with every object that a file may have, but those inside collections, which differ as a
whole."""
NEED_RESTART = {
    "store", "coordinator", "changes", "quotas", "events", "projections", "plugins", "backup", "server.host",
    "server.port", "server.admin", "server.workers", "server.quickCheckMaxBytes",
}  # fmt: skip


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "x"
        case None:
            return "x"
        case tuple():
            return (*value, *value[:1]) if value else ("x",)
    return {**value, "another": next(iter(value.values()), ())}


def each_change(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every member of a configuration by its path, and the configuration in which it is another."""
    for field in dataclasses.fields(tree):
        value, at = getattr(tree, field.name), f"{path}{wire_name(field.name)}"
        if dataclasses.is_dataclass(value):
            for inner, changed in each_change(value, f"{at}."):
                yield inner, dataclasses.replace(tree, **{field.name: changed})
        elif get_args(field.type)[1:] or not get_args(field.type):
            yield at, dataclasses.replace(tree, **{field.name: other(value)})


def test_every_member_is_applied_or_needs_a_restart() -> None:
    """The schema marks the members that need a restart, and so does the reference."""
    whole = config.parse(EVERYTHING)
    found = {path: list(changes(whole, changed)) for path, changed in each_change(whole)}
    for path, (change,) in found.items():
        named = {path, path.rpartition(".")[0], path.partition(".")[0]}
        assert change == (path, not named.isdisjoint(NEED_RESTART)), path
    members = {wire_name(field.name) for field in dataclasses.fields(Config)}
    assert members - {path.partition(".")[0] for path in found} == {"version"}


async def test_each_changed_member_that_needs_a_restart_is_named(session: aiohttp.ClientSession) -> None:
    async with running(session, NOTES) as service:
        before = service.app.current
        with pytest.raises(ConfigError) as refused:
            await service.reload(MINE, coordinator="memory:", server={"port": 1, "logLevel": "error"})
        assert [str(problem) for problem in refused.value.problems] == [
            "server.port: has changed, and needs a restart",
            "coordinator: has changed, and needs a restart",
        ]
        assert service.app.current is before
        assert (await service.browser.pull("notes/a")).status == 200


async def test_the_parts_of_the_process_are_as_after_a_start(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    members: dict[str, Any] = {
        "store": f"file:{tmp_path}/data",
        "server": {
            "maxQueueMs": 9_000,
            "maxConnections": 70,
            "maxStreams": 30,
            "maxStreamsPerCaller": 3,
            "maxBytesInFlight": 9_999,
        },
        "scrub": {"everyMs": 5_000},
    }

    def limits(app: App) -> list[Any]:
        assert app.jobs.scrubber is not None
        work = app.in_flight.work.max_bytes, app.in_flight.budget.max_bytes
        load, streams = app.load, app.subscribers.limits
        return [load.max_wait_s, load.max_connections, streams, work, app.jobs.scrubber.config]

    async with running(session, store=members["store"], scrub=False) as service:
        await service.reload(**members)
        reloaded = limits(service.app)
    async with running(session, **members) as service:
        assert limits(service.app) == reloaded


# What requests find


async def test_other_collections_roles_and_limits_are_those_of_the_next_request(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text("<p>")
    async with running(session, NOTES, server={"publicHosts": ["a.example"]}) as service:
        browser = service.browser
        assert (await browser.pull("notes/a")).status == 421
        await service.reload(
            collection("notes", maxBodyBytes=100, requireAuth=True),
            collection("more"),
            namespaces={"team": {"collections": [NOTES]}},
            server={
                "mountPath": "/v1",
                "cors": {"origins": ["https://a.example"]},
                "examples": str(tmp_path),
            },
            auth={"adminToken": ADMIN},
            configEndpoint={"auth": "public"},
        )
        assert (await browser.pull("notes/a")).status == 404
        within = Browser(f"{browser.base}/v1", session)
        assert (await within.push("more/a", {})).status == 200
        assert (await within.pull("team/notes/a")).status == 404
        assert (await within.request("GET", "/team/pull/notes/a")).status == 200
        assert (await within.pull("notes/a")).status == 401
        assert (await within.pull("notes/a", AS_ADMIN)).status == 200
        assert (await within.push("notes/a", {"long": "x" * 100}, headers=AS_ADMIN)).status == 413
        assert (await within.request("GET", "/examples/page.html")).body == b"<p>"
        manifest = await within.request("GET", "/config", headers={"Origin": "https://a.example"})
        assert manifest.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert [one["name"] for one in manifest.json["collections"]] == ["notes", "more"]
        await service.reload()
        assert (await within.pull("more/a")).status == (await browser.pull("notes/a")).status == 404


async def test_a_cached_certificate_gives_no_role_that_was_taken_away(session: aiohttp.ClientSession) -> None:
    owned = collection("owned", "o/{id}", readRoles=["editor"], writeRoles=["editor"])
    roles = {"identityRoles": {SUBJECT.user_id: ["editor"]}}
    async with running(session, owned, auth=roles) as service:
        signer = service.signed()
        assert [(await signer.pull("o/a")).status for _ in range(2)] == [200, 200]
        await service.reload(owned)
        assert (await signer.pull("o/a")).status == 403
        await service.reload(owned, auth=roles)
        assert (await signer.pull("o/a")).status == 200


async def test_a_request_under_way_ends_with_the_configuration_with_which_it_began(
    session: aiohttp.ClientSession,
) -> None:
    body = b'{"data":{"n":1},"baseHash":null}'
    async with running(session, NOTES) as service:
        host, _, port = service.browser.base.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n".encode())
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        await service.reload()
        writer.write(body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.split()[1] == b"200"
        length = next(line for line in answer.splitlines() if line.startswith(b"Content-Length"))
        await reader.readexactly(int(length.split()[1]))
        writer.write(b"GET /pull/notes/a HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"404", "the same connection, afterwards"
        writer.close()


async def test_nonces_counters_and_idempotency_carry_on(session: aiohttp.ClientSession) -> None:
    limited = collection("limited", rateLimit={"pull": limit_of(2)})
    members = {"auth": {"adminToken": ADMIN}}
    async with running(session, MINE, NOTES, limited, **members) as service:
        key, browser = f"u/{SUBJECT.user_id}/a", service.browser
        headers = service.signed().headers("GET", f"/pull/{key}", b"")
        assert (await browser.pull(key, headers)).status == 200
        once = {"Idempotency-Key": "1"}
        pushed = (await browser.push("notes/a", {}, headers=once)).json
        assert (await browser.pull("limited/a")).status == 200
        counted = service.app.render_metrics()
        await service.reload(MINE, NOTES, limited, **members)
        assert (await browser.pull(key, headers)).status == 401
        assert (await browser.push("notes/a", {}, headers=once)).json == pushed
        assert [(await browser.pull("limited/a")).status for _ in range(2)] == [200, 429]
        pushes = b'pysync_requests_total{action="push",collection="notes",status="200"} %d'
        assert pushes % 1 in counted
        assert pushes % 2 in service.app.render_metrics()


async def test_a_refused_configuration_changes_nothing(session: aiohttp.ClientSession) -> None:
    class Keeper(NotifiedPlugin):
        stored_files = {"notes": FileBackedCollection("kept/{id}")}

    async with running(session, NOTES, options={"plugins": [Keeper()]}) as service:
        with pytest.raises(ConfigError, match="plugin told: stored_files: there is no collection 'notes'"):
            await service.reload(MINE)
        with pytest.raises(ValueError, match=r"server.examples: /nowhere: No such file"):
            await service.reload(NOTES, MINE, server={"examples": "/nowhere"})
        assert (await service.browser.pull("notes/a")).status == 200
        assert (await service.browser.pull("u/x/a")).error == (404, "Not found")


async def test_checked_configuration_is_applied_though_its_file_changes(
    session: aiohttp.ClientSession, tmp_path: Path, own_logging: None
) -> None:
    file = tmp_path / "pysync.json"

    def write(*collections: dict[str, Any]) -> None:
        file.write_text(json.dumps(patient({"store": "memory:", "collections": collections})))

    def read() -> Config:
        found = config.load(file)
        file.write_text("{")  # an editor saves it at this moment
        return found

    write(MINE)
    async with running(session, NOTES) as service:
        reloads = Reloads(service.app, read)
        assert await reloads.reload() == ["collections"]
        assert service.app.current.config == parsed(MINE)
        with pytest.raises(ReloadRefused, match=r"pysync\.json"):
            await reloads.reload()
        assert service.app.current.config == parsed(MINE)


async def test_worker_that_was_blocked_applies_what_it_was_asked_for_last(
    session: aiohttp.ClientSession,
) -> None:
    """The parent gave up the first reload, and requested another one before the worker went on."""
    parents, workers = connect(timeout_s=10.0)
    with parents, workers:
        async with running(session, NOTES) as service:
            reloads = WorkerReloads(Reloads(service.app, None), workers)
            given_up = [collection(f"c{at}", f"c{at}/{{id}}") for at in range(50)]
            for message in (Prepare(1, parsed(*given_up)), Prepare(2, parsed(MINE)), Apply(3)):
                reloads.received(message)
            for number in (1, 2, 3):
                assert await asyncio.to_thread(parents.poll, 10)
                assert parents.recv() == Reply(number)
            assert service.app.current.config == parsed(MINE)


# Streams


async def test_streams_end_and_resume_under_the_new_rights(
    session: aiohttp.ClientSession, subscribe: Listen
) -> None:
    owned = collection("owned", "o/{id}", readRoles=["reader"], writeRoles=["public"])
    roles = {"identityRoles": {SUBJECT.user_id: ["reader"], STRANGER.user_id: ["reader"]}}
    async with running(session, owned, NOTES, auth=roles) as service:
        losing, keeping = service.signed(SUBJECT), service.signed(STRANGER)
        streams = [await subscribe(who, collections="owned") for who in (losing, keeping)]
        await service.browser.push("o/1", {})
        assert [(await stream.event()).data["params"] for stream in streams] == [{"id": "1"}] * 2
        await service.reload(owned, NOTES, auth={"identityRoles": {STRANGER.user_id: ["reader"]}})
        for stream in streams:
            (*_, last) = await stream.rest()
            assert last.retry is not None
        await service.browser.push("o/2", {})
        refused = await subscribe(losing, headers={"Last-Event-ID": streams[0].last_id}, collections="owned")
        assert refused.status == 403
        resumed = await subscribe(keeping, headers={"Last-Event-ID": streams[1].last_id}, collections="owned")
        assert (await resumed.event()).data["params"] == {"id": "2"}


async def test_a_stream_that_begins_during_a_reload_ends_and_resumes(
    session: aiohttp.ClientSession, subscribe: Listen
) -> None:
    """The configuration before has authorised it."""
    authorized, may_begin = asyncio.Event(), asyncio.Event()

    class Slow(MemoryCoordinator):
        async def last_id(self) -> str:
            authorized.set()
            await may_begin.wait()
            return await super().last_id()

    async with running(session, NOTES, options={"coordinator": Slow()}) as service:
        beginning = asyncio.ensure_future(subscribe(service.browser, collections="notes"))
        await authorized.wait()
        await service.reload(NOTES)
        may_begin.set()
        stream = await beginning
        (*_, last) = await stream.rest()
        assert last.retry is not None
        await service.browser.push("notes/a", {})
        resumed = await subscribe(
            service.browser, headers={"Last-Event-ID": stream.last_id}, collections="notes"
        )
        assert (await resumed.event()).data["params"] == {"id": "a"}


@pytest.mark.slow
async def test_no_request_fails_and_no_event_is_lost_while_it_reloads(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    done = asyncio.Event()
    written: list[str] = []

    async def write(service: Reloaded, number: int) -> None:
        signer, base = service.signed(), None
        while not done.is_set():
            reply = await signer.push(f"notes/{number}", {"who": number, "n": len(written)}, base)
            assert reply.status == 200, reply.body
            base = reply.json["hash"]
            written.append(base)

    store = f"file:{tmp_path}/data"
    async with running(session, NOTES, LOG, store=store) as service:
        received: list[str] = []
        watching = asyncio.create_task(follow(service.browser, received))
        for n in count():
            await service.browser.push(f"notes/first-{n}", {})
            if received:
                break
        writers = [asyncio.create_task(write(service, number)) for number in range(8)]
        for n in range(50):
            seen = len(written)
            while len(written) < seen + 20:
                await asyncio.sleep(0)
            await service.reload(NOTES, LOG, collection(f"other-{n}"), store=store)
        done.set()
        await asyncio.gather(*writers)
        while not set(written) <= set(received):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait([watching])
    counts = Counter(received)
    assert {counts[hash_] for hash_ in written} == {1}


# Work in the background


async def test_jobs_go_on_with_the_new_configuration_and_none_runs_twice(
    session: aiohttp.ClientSession,
) -> None:
    clock = FakeClock()
    async with running(session, NOTES, options={"now_ms": clock}) as service:
        browser = service.browser
        await browser.push("notes/a", {})
        tasks = len(asyncio.all_tasks())
        sweep = service.app.jobs.ttl_sweeper.sweep
        clock.now_ms += 10_000
        assert await sweep() == 0
        for _ in range(5):
            await service.reload(collection("notes", ttlMs=5_000))
        assert len(asyncio.all_tasks()) == tasks
        assert await sweep() == 1
        await browser.push("notes/b", {})
        clock.now_ms += 10_000
        await service.reload(NOTES)
        assert await sweep() == 0


class Deleting(LocalStore):
    """Calls `on_delete` after each deletion."""

    on_delete: Callable[[], Awaitable[None]]

    async def commit(self, write: Write) -> str:
        etag = await super().commit(write)
        if write.body is None:
            await self.on_delete()
        return etag


async def test_a_sweep_deletes_nothing_more_once_it_need_not(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    clock = FakeClock()
    store = await Deleting.open_folder(tmp_path / "data", clock)
    short = collection("notes", ttlMs=5_000)
    async with running(session, short, options={"now_ms": clock, "store": store}) as service:
        for n in range(5):
            await service.browser.push(f"notes/{n}", {})
        clock.now_ms += 10_000
        store.on_delete = lambda: service.reload(NOTES)
        assert await service.app.jobs.ttl_sweeper.sweep() == 1


async def test_projections_read_sources_that_were_added(session: aiohttp.ClientSession) -> None:
    titles = {"source": "notes", "target": "titles", "id": "{id}", "wait": True}
    listed = collection("titles", "titles", pullOnly=True, writeRoles=[])
    async with running(session, NOTES, listed, projections=[titles]) as service:
        assert (await service.browser.push("notes/a", {})).status == 200
        inner = {"team": {"collections": [collection("notes", "team/{id}")]}}
        await service.reload(NOTES, listed, projections=[titles], namespaces=inner)
        pushed = await service.browser.request("POST", "/team/push/team/b", {"data": {}, "baseHash": None})
        assert pushed.status == 200
        items = (await service.browser.pull("titles")).json["data"]["items"]
        assert [item["id"] for item in items] == ["a", "b"]


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_quotas_count_what_an_added_collection_stores(
    session: aiohttp.ClientSession, tmp_path: Path, kind: str
) -> None:
    store = "memory:" if kind == "memory" else f"file:{tmp_path}/data"
    quotas = {"identity": {"documents": 2}}
    other = collection("other", "other/{identity}/{id}", **OWN)
    async with running(session, MINE, store=store, quotas=quotas) as service:
        signer = service.signed()
        key = f"{SUBJECT.user_id}/a"
        if service.app.usage_count is not None:
            await service.app.usage_count.run_if_needed()
        assert (await signer.push(f"u/{key}", {})).status == 200
        await service.reload(MINE, other, store=store, quotas=quotas)
        replies = [(await signer.push(f"other/{key}{n}", {})).status for n in range(2)]
        assert replies == [200, 507]
