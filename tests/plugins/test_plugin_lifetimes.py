"""When plugins begin and end, what they think of certificates, and that nobody pays for them who has none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Signed, Start, minted_at, root_device
from support.faulty_store import FaultyStore
from support.loop_time import loop_time
from support.plugin_samples import EVERYTHING, MINE, NOTES, batch, people

from pysync import config
from pysync.auth import issuing
from pysync.auth.certificates import Certificate
from pysync.config import Config
from pysync.model import WriteEvent
from pysync.plugins import PluginContext
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on
from pysync.store.memory import MemoryStore


class Lasting:
    """Notes when it begins and ends; `fails` where it does not."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name = name
        self.log = log
        self.fails = fails
        self.services: PluginContext | None = None

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        if self.fails == "begin":
            raise OSError("no such database")
        self.services = services
        self.log.append(f"{self.name} begins")
        yield
        self.log.append(f"{self.name} ends")
        if self.fails == "end":
            raise OSError("the database is gone")
        if self.fails == "never":
            await asyncio.Event().wait()
        if self.fails == "end of a task":
            task = asyncio.create_task(asyncio.Event().wait())
            task.cancel()
            await task

    async def after_write(self, event: WriteEvent) -> None:
        self.log.append(f"{self.name} is told")


def settings(*collections: Any, **members: Any) -> Config:
    return config.parse({"store": "memory:", "collections": list(collections or (NOTES,)), **members})


async def test_a_plugin_lives_from_before_the_first_request_until_after_the_last(
    session: aiohttp.ClientSession,
) -> None:
    log: list[str] = []
    plugins = [Lasting("one", log), Lasting("two", log)]
    store = FaultyStore(MemoryStore())
    app = await create_app(settings(), store, plugins=plugins)
    assert log == ["one begins", "two begins"]
    release = asyncio.Event()
    async with app:
        async with serve_on(app) as port:
            *_, anyone = people(f"http://127.0.0.1:{port}", session)
            arrived = store.delay("put", release)
            pushing = asyncio.create_task(anyone.push("notes/a", {}))
            await arrived.wait()
            asyncio.get_running_loop().call_soon(release.set)
        assert (await pushing).status == 200
        log.append("all are gone")
    assert log[2:] == ["one is told", "two is told", "all are gone", "two ends", "one ends"]


async def test_a_plugin_that_does_not_begin_keeps_the_server_from_starting() -> None:
    log: list[str] = []
    plugins = [Lasting("one", log), Lasting("two", log, "begin"), Lasting("three", log)]
    with pytest.raises(ValueError, match="plugin two: it does not start: no such database"):
        await create_app(settings(), plugins=plugins)
    assert log == ["one begins", "one ends"]


@pytest.mark.parametrize("fails", ["end", "end of a task"])
async def test_a_plugin_that_ends_badly_keeps_no_other_from_ending(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    plugins = [Lasting("one", log), Lasting("two", log, fails), Lasting("three", log)]
    async with await create_app(settings(), plugins=plugins):
        log.clear()
    assert log == ["three ends", "two ends", "one ends"]
    assert caplog.messages == ["plugin two: lifespan failed"]


async def test_a_plugin_that_does_not_end_keeps_no_process_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    plugins = [Lasting("one", log), Lasting("two", log, "never"), Lasting("three", log)]
    app = await create_app(settings(), plugins=plugins)
    log.clear()
    with loop_time() as time:
        await time.pass_until(asyncio.ensure_future(app.close()), 1.0)
    assert log == ["three ends", "two ends", "one ends"]
    assert caplog.messages == ["plugin two: lifespan took too long"]


async def test_a_plugin_works_with_what_serves_requests(start: Start, session: aiohttp.ClientSession) -> None:
    lasting = Lasting("one", [])
    *_, anyone = people(await start({"collections": [NOTES]}, plugins=[lasting]), session)
    services = lasting.services
    assert services is not None
    pushed = await anyone.push("notes/a", {"n": 1})
    document = await services.documents.pull("notes/a")
    assert document is not None
    assert document.hash == pushed.json["hash"]
    assert services.config.collections[0].name == "notes"
    assert services.sweeps
    services.count("pysync_plugin_failures", "one", "of its own", by=3)
    page = (await anyone.request("GET", "/metrics")).body.decode()
    assert 'pysync_plugin_failures_total{hook="of its own",plugin="one"} 3.0' in page
    newest = await services.outbox.log.last_id()
    await anyone.push("notes/b", {})
    assert len(await services.outbox.log.read(newest, 9) or ()) == 1


class Choosy:
    """Refuses certificates of a kind, by a code, and counts those that it saw."""

    name = "choosy"

    def __init__(self, kind: str, code: str | Exception | None) -> None:
        self.cap_validators = {kind: self._validate}
        self.code = code
        self.seen: list[str] = []

    def _validate(self, certificate: Certificate) -> str | None:
        self.seen.append(certificate.kind)
        if isinstance(self.code, Exception):
            raise self.code
        return self.code


async def test_certificate_is_checked_once_and_then_remembered(
    start: Start, session: aiohttp.ClientSession
) -> None:
    choosy = Choosy("device", None)
    base = await start({"collections": [MINE]}, plugins=[choosy])
    someone, *_ = people(base, session)
    for _ in range(3):
        assert (await someone.pull(f"u/{ISSUER.user_id}")).status == 200
    assert choosy.seen == ["device"]
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "u", grant=issuing.writer_grant("u"), **minted_at()
    )
    member = Signed(base, session, SUBJECT, certificate)
    assert (await member.pull(f"u/{SUBJECT.user_id}")).status == 200
    assert choosy.seen == ["device"], "it looks at devices alone"


async def test_a_certificate_that_a_plugin_rejects_is_none(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"collections": EVERYTHING, "configEndpoint": {"auth": "role-filtered"}}
    base = await start(members, plugins=[Choosy("device", "device-unknown")])
    someone, *_ = people(base, session)
    with caplog.at_level("INFO"):
        for _ in range(2):
            rejected = await someone.pull(f"u/{ISSUER.user_id}")
            assert rejected.error == (401, "Unauthorized")
            assert b"unknown" not in rejected.body
    assert caplog.messages.count("cap-cert plugin reject: device-unknown") == 2
    found = await batch(someone, notes=[{"id": "a"}], mine=[{"identity": ISSUER.user_id}])
    assert found["notes"][0]["data"] == {}
    assert found["mine"] == [{"error": "Forbidden"}]
    shown = await someone.request("GET", "/config")
    assert shown.json["collections"] == []


async def test_certificate_that_a_plugin_fails_to_check_is_an_error(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({"collections": [MINE]}, plugins=[Choosy("device", RuntimeError("away"))])
    someone, *_ = people(base, session)
    assert (await someone.pull(f"u/{ISSUER.user_id}")).error == (500, "Authorization error")
    page = (await someone.request("GET", "/metrics")).body.decode()
    assert 'pysync_plugin_failures_total{hook="cap_validators",plugin="choosy"} 1.0' in page


async def test_certificate_that_only_introduces_is_checked_too(
    start: Start, session: aiohttp.ClientSession
) -> None:
    shared = {**NOTES, "readRoles": ["cap:read:notes"], "writeRoles": []}
    members = {"collections": [shared], "configEndpoint": {"auth": "role-filtered"}}
    certificate = issuing.issue_audience_certificate(
        ISSUER, "notes", grant=issuing.reader_grant("notes"), **minted_at()
    )
    presented = {"Authorization": certificate.authorization}
    for code, shown in ((None, 1), ("audience-closed", 0)):
        base = await start(members, plugins=[Choosy("audience", code)])
        *_, anyone = people(base, session)
        page = await anyone.request("GET", "/config", headers=presented)
        assert len(page.json["collections"]) == shown


async def test_every_plugin_checks_a_certificate(start: Start, session: aiohttp.ClientSession) -> None:
    one, two = Choosy("device", None), Choosy("device", "no")
    two.name = "two"
    base = await start({"collections": [MINE]}, plugins=[one, two])
    stranger = Signed(base, session, STRANGER, root_device(STRANGER))
    assert (await stranger.pull(f"u/{STRANGER.user_id}")).status == 401
    assert (one.seen, two.seen) == (["device"], ["device"])
