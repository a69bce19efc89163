"""The inbox of a replica in a browser: what others write arrives, whatever was missed, and removals, too."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Chromium
from support.bucket_feed import be_bucket
from support.cli_runner import Shell
from support.clients import ISSUER, SUBJECT, Start, root_device
from support.collections import UNSIGNED, collection
from support.http_relay import RequestHead
from support.replicas import DAY_MS, Service
from support.web_pages import PAGES, blank_page
from support.web_replicas import Tab, WebSite

from pysync.auth import issuing
from pysync.client import Client
from pysync.clock import wall_clock_ms
from pysync.testing import FakeClock

COLLECTIONS = [
    collection("notes", deletable=True, listable=True),
    collection("plain", deletable=True),
    collection("cells", "sheets/{sheet}/{cell}", deletable=True, listable=True),
    collection("log", appendOnly=UNSIGNED, deletable=True),
    collection("entries", appendOnly={"field": "entries", "requireAuthorSignature": False}),
    collection("files", allowedMimeTypes=["image/png"], deletable=True, listable=True),
    collection("rooms", "rooms/{id}", readRoles=["cap:read:rooms"], writeRoles=["public"], listable=True),
    collection("access", "s/{space}/_access", readRoles=["space:member"], writeRoles=["space:owner"]),
    collection("docs", "s/{space}/{id}", readRoles=["space:member"], writeRoles=["space:member"]),
]
AUTH = {
    "trustedIssuers": [ISSUER.ed_pub],
    "spaces": {"accessPath": "s/{space}/_access", "param": "space"},
}
NOTES: dict[str, Any] = {"notes": {}}
OPEN = """async (base, collections) => {
  await window.replica?.close()
  window.client ??= new pysync.Client(base, {backoff: {attempts: 1, initialS: 0.01, maxS: 0.05}})
  window.replica = await pysync.Replica.open("notes", client, collections)
}"""
FORGET_CURSORS = """(async () => {
  await replica.close()
  const done = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result) })
  const database = await done(indexedDB.open("pysync-replica:notes"))
  const feeds = database.transaction("feed", "readwrite").objectStore("feed")
  for (const feed of await done(feeds.getAll())) {
    await done(feeds.put({...feed, cursor: "00000000000000001-00000000"}))
  }
  database.close()
})()"""


class Phone(Tab):
    """A window with a replica whose cursors may be lost."""

    def __init__(self, tab: Tab, base: str) -> None:
        super().__init__(tab.window)
        self._base = base

    async def open(self, collections: Any = NOTES) -> None:
        """Open the replica again."""
        await self.window.run(OPEN, self._base, collections)

    async def sync(self, collections: Any = NOTES) -> None:
        """Open the replica again, and have it receive and send everything."""
        await self.open(collections)
        await self.synced()

    async def forget_cursors(self) -> None:
        """Have the replica come back with cursors of another log, as after the loss of the server's."""
        await self.window.run(FORGET_CURSORS)

    async def keys(self) -> Any:
        return await self.window.run("replica.keys()")

    async def file(self, key: str) -> Any:
        return await self.window.run("(key) => replica.file(key).then((file) => file && file.text())", key)


@pytest.fixture
async def site(start: Start) -> AsyncIterator[WebSite]:
    async with WebSite.open(start, *COLLECTIONS, auth=AUTH) as site:
        yield site


@pytest.fixture
async def direct(site: WebSite) -> AsyncIterator[Client]:
    """Somebody else, who reaches the service directly."""
    async with Client(site.base) as client:
        yield client


@pytest.fixture
async def phone(site: WebSite, screen: Chromium) -> Phone:
    """A window in which no replica is open yet."""
    return Phone(Tab(await blank_page(screen, site.proxy.url)), site.proxy.url)


async def replace(client: Client, key: str, data: dict[str, Any]) -> None:
    await client.push(key, data, (await client.pull(key)).hash or None)


async def remove(client: Client, key: str) -> None:
    await client.delete(key, (await client.pull(key)).hash)


async def fill(client: Client) -> None:
    await asyncio.gather(*(client.push(f"notes/n{n:03}", {"n": n}) for n in range(130)))


async def change_some(client: Client) -> None:
    await replace(client, "notes/n001", {"n": "changed"})
    await remove(client, "notes/n002")
    await client.push("notes/new", {"n": "new"})


async def check_some(phone: Phone) -> None:
    assert await phone.keys() == [f"notes/n{n:03}" for n in range(130) if n != 2] + ["notes/new"]
    found = [await phone.get(f"notes/{name}") for name in ("n000", "n001", "n002", "new")]
    assert found == [{"n": 0}, {"n": "changed"}, None, {"n": "new"}]


async def test_changes_and_removals_of_others_are_received_when_the_replica_opens(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    await fill(direct)
    await phone.sync()
    await phone.window.run("replica.close()")
    await change_some(direct)
    site.proxy.reset_counts()
    await phone.sync()
    await check_some(phone)
    assert site.proxy.calls["GET"] <= 5  # a page, a batch, the stream, and the page that it leads to


async def test_edit_that_waits_is_merged_with_what_is_received(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    await direct.push("notes/a", {"title": "old", "n": 1})
    await phone.sync()
    site.proxy.abort("POST", times=None)
    await phone.put({"title": "ours", "n": 1}, "notes/a")
    await replace(direct, "notes/a", {"title": "old", "n": 2})
    await phone.shows({"title": "ours", "n": 2}, "notes/a")
    site.proxy.reset()
    await phone.synced()
    assert (await direct.pull("notes/a")).data == {"title": "ours", "n": 2}


async def test_removal_deletes_the_local_copy_unless_an_edit_waits(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    for name in "ab":
        await direct.push(f"notes/{name}", {"n": 1})
    await phone.sync()
    site.leave()
    await phone.put({"n": 2}, "notes/a")
    for name in "ab":
        await remove(direct, f"notes/{name}")
    site.proxy.reset()
    await phone.synced()
    assert await phone.keys() == ["notes/a"]
    assert (await direct.pull("notes/a")).data == {"n": 2}


async def test_documents_that_were_not_received_yet_can_be_deleted(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    await direct.push("notes/a", {"n": 1})
    site.leave()
    await phone.open()
    await phone.window.run("Promise.all(['notes/a', 'notes/none'].map((key) => replica.delete(key)))")
    assert (await phone.status())["unsent"] == 2
    site.proxy.reset()
    await phone.synced()
    status = await phone.status()
    assert (await phone.keys(), status["unsent"], status["rejected"]) == ([], 0, [])
    assert (await direct.pull("notes/a")).hash == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log", "entries"])
async def test_newest_elements_of_logs_are_received(direct: Client, phone: Phone, name: str) -> None:
    log = f"{name}/a"
    for n in range(3):
        await direct.append(log, {"n": n})
    await phone.sync({name: {}})
    assert await phone.tail(log) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert (await phone.keys(), await phone.get(log)) == ([log], None)
    for n in range(3, 1010):
        await direct.append(log, {"n": n})
    await phone.synced()
    kept = await phone.window.run("(log) => replica.tail(log, 2000)", log)
    assert [element["data"] for element in kept] == [{"n": n} for n in range(10, 1010)]
    await phone.append({"n": 1010}, log)
    await direct.append(log, {"n": 1011})
    await phone.synced()
    await phone.synced()
    elements = (await direct.pull(log, full=True)).elements(None)
    assert (await phone.tail(log))[-5:] == [element.data for element in elements[-5:]]


async def test_files_are_fetched_on_demand_and_kept_until_they_change(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    await direct.push_blob("files/cat", b"one", "image/png")
    await phone.sync({"files": {}})
    assert (await phone.keys(), await phone.get("files/cat")) == (["files/cat"], None)
    assert await phone.file("files/cat") == "one"
    site.proxy.reset_counts()
    assert await phone.file("files/cat") == "one"
    assert site.proxy.calls.total() == 0
    assert await phone.file("files/none") is None
    await direct.push_blob("files/cat", b"two", "image/png")
    await phone.synced()
    assert await phone.file("files/cat") == "two"


async def test_names_that_make_a_batch_too_long_are_received(direct: Client, phone: Phone) -> None:
    names = [f"{n:03d}".ljust(200, "x") for n in range(100)]
    await asyncio.gather(*(direct.push(f"notes/{name}", {"n": 1}) for name in names))
    await phone.sync()
    assert await phone.keys() == [f"notes/{name}" for name in names]


async def test_param_sets_narrow_a_collection_and_edits_of_others_are_still_sent(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    for sheet in "abc":
        await direct.push(f"sheets/{sheet}/x", {"n": 1})
    await phone.sync({"cells": [{"sheet": "a"}, {"sheet": "b"}]})
    assert await phone.keys() == ["sheets/a/x", "sheets/b/x"]
    site.leave()
    await phone.put({"n": 2}, "sheets/a/y")
    await phone.open({"cells": [{"sheet": "b"}, {"sheet": "c"}]})
    site.proxy.reset()
    await phone.synced()
    assert (await direct.pull("sheets/a/y")).data == {"n": 2}
    await phone.sync({"cells": [{"sheet": "b"}, {"sheet": "c"}]})
    assert await phone.keys() == ["sheets/a/y", "sheets/b/x", "sheets/c/x"]


async def with_certificate(site: WebSite, phone: Phone, *collections: str, **options: Any) -> None:
    """Have the client of the page act with a certificate for these collections."""
    certificate = root_device(ISSUER, collections=collections, **options)
    if not await phone.window.run("Boolean(window.client)"):
        await site.open_replica(phone, ISSUER, certificate, {"rooms": {}, "notes": {}})
    await phone.window.run(
        "async (text) => { client.certificate = await pysync.parseCertificate(text) }",
        certificate.text.decode(),
    )


async def test_collection_that_may_be_read_again_begins_anew_and_keeps_its_copies_until_then(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    """Meanwhile other collections go on, and what was written and removed is not missed."""
    await direct.push("rooms/a", {"n": 1})
    await with_certificate(site, phone, "rooms")
    await phone.synced()
    assert await phone.keys() == ["rooms/a"]
    await with_certificate(site, phone, "notes")
    await direct.push("rooms/b", {"n": 1})
    await direct.push("notes/a", {"n": 1})
    await phone.synced()
    assert (await phone.status())["error"] == ["Forbidden", "forbidden"]
    assert await phone.keys() == ["notes/a", "rooms/a"]
    await with_certificate(site, phone, "rooms")
    await phone.synced()
    assert (await phone.status())["error"] is None
    assert await phone.keys() == ["notes/a", "rooms/a", "rooms/b"]


async def test_certificate_that_allows_more_begins_everything_anew(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    for name in "ab":
        await direct.push(f"rooms/{name}", {"n": 1})
    grant = issuing.Grant(ops=("read", "write", "list"), paths=("rooms/a",))
    await with_certificate(site, phone, "rooms", grant=grant)
    await phone.synced()
    assert await phone.keys() == ["rooms/a"]
    await with_certificate(site, phone, "rooms")
    await phone.synced()
    assert await phone.keys() == ["rooms/a", "rooms/b"]
    await with_certificate(site, phone, "rooms", grant=grant)
    await phone.synced()
    assert await phone.keys() == ["rooms/a", "rooms/b"]  # copies stay


async def test_new_member_of_a_space_receives_what_is_there(site: WebSite, phone: Phone) -> None:
    """Also if the replica is closed before it has asked for it."""
    params: dict[str, Any] = {"docs": {}, "access": {}}
    async with Client(site.base, keys=ISSUER) as owner:
        access = await owner.push("s/a/_access", {"owner": ISSUER.user_id})
        await owner.push("s/a/doc", {"n": 1})
        await site.open_replica(phone, SUBJECT, None, params)
        await phone.synced()
        assert await phone.keys() == []
        site.proxy.abort(when=lambda sent: sent.path == "changes" and "since" not in sent.query, times=None)
        members = {"owner": ISSUER.user_id, "members": [SUBJECT.user_id]}
        await owner.push("s/a/_access", members, access.hash)
        assert await phone.error_of("replica.synced()") == ["Unreachable", None]
    await phone.open(params)
    assert await phone.keys() == ["s/a/_access"]
    site.proxy.reset()
    await phone.synced()
    assert await phone.keys() == ["s/a/_access", "s/a/doc"]


async def test_reset_is_followed_by_a_comparison_with_hashes(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    """Of 130 documents one batch is fetched: what changed, and what is new; what is gone is asked for."""
    await fill(direct)
    await phone.sync()
    await phone.forget_cursors()
    await change_some(direct)
    requested: list[str] = []

    def note(sent: RequestHead) -> bool:
        requested.append(sent.path.split("/")[0])
        return False

    site.proxy.abort(when=note)
    await phone.sync()
    await check_some(phone)
    assert [path for path in requested if path != "events"][:4] == ["changes", "list", "batch", "batch"]


@pytest.mark.parametrize(("name", "prefix"), [("plain", "plain"), ("cells", "sheets/a")])
async def test_collections_that_cannot_be_listed_are_compared_with_the_feed(
    direct: Client, phone: Phone, name: str, prefix: str
) -> None:
    for key in ("same", "changed", "removed"):
        await direct.push(f"{prefix}/{key}", {"n": 1})
    await phone.sync({name: {}})
    await phone.forget_cursors()
    await replace(direct, f"{prefix}/changed", {"n": 2})
    await remove(direct, f"{prefix}/removed")
    await direct.push(f"{prefix}/new", {"n": 1})
    await phone.sync({name: {}})
    assert await phone.window.run("replica.entries()") == [
        [f"{prefix}/changed", {"n": 2}], [f"{prefix}/new", {"n": 1}], [f"{prefix}/same", {"n": 1}]
    ]  # fmt: skip


async def test_logs_and_files_are_compared_too(direct: Client, phone: Phone) -> None:
    collections: dict[str, Any] = {"log": {}, "files": {}}
    for key in ("same", "changed", "removed"):
        await direct.append(f"log/{key}", {"n": 1})
        await direct.push_blob(f"files/{key}", b"1", "image/png")
    await phone.sync(collections)
    await phone.forget_cursors()
    await direct.append("log/changed", {"n": 2})
    await direct.push_blob("files/changed", b"2", "image/png")
    await direct.delete("log/removed", (await direct.pull("log/removed", last=0)).hash)
    await direct.delete("files/removed", hashlib.sha256(b"1").hexdigest())
    await phone.sync(collections)
    assert await phone.keys() == ["files/changed", "files/same", "log/changed", "log/same"]
    assert await phone.tail("log/changed") == [{"n": 1}, {"n": 2}]
    assert await phone.file("files/changed") == "2"


async def test_bucket_is_compared_by_names_and_known_hashes(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    """It has no feed from the beginning, and no hashes in lists."""
    await fill(direct)
    be_bucket(site.proxy)
    await phone.sync()
    assert len(await phone.keys()) == 130
    await phone.window.run("replica.close()")
    await change_some(direct)
    be_bucket(site.proxy)
    await phone.sync()
    await check_some(phone)


async def test_application_decides_what_a_restored_bucket_gets_back(
    site: WebSite, direct: Client, phone: Phone
) -> None:
    """The bucket cannot say when its versions were written. What it does not have at all it gets."""
    for name in ("same", "older", "missing"):
        await direct.push(f"notes/{name}", {"n": 1})
    await phone.sync()
    await phone.window.run("replica.close()")
    await replace(direct, "notes/older", {"n": 0})
    await remove(direct, "notes/missing")
    be_bucket(site.proxy, restored=1)
    await phone.sync()
    await phone.synced()
    assert (await phone.status())["rejected"] == [["notes/older", "put", "Conflict"]]
    assert await phone.get("notes/older") == {"n": 0}
    assert await phone.get("notes/missing") == {"n": 1} == (await direct.pull("notes/missing")).data
    await phone.window.run("replica.retry('notes/older')")
    await phone.synced()
    assert (await phone.status())["rejected"] == []
    assert (await direct.pull("notes/older")).data == {"n": 1}


async def test_server_restored_with_accept_newer_gets_back_what_it_lost(
    tmp_path: Path, shell: Shell, screen: Chromium
) -> None:
    clock = FakeClock(wall_clock_ms())
    service = Service(tmp_path / "data", clock, collections=COLLECTIONS[:1], server={"examples": str(PAGES)})
    await service.start()
    async with Client(service.url, now_ms=clock) as direct:
        for name in ("kept", "changed", "removed"):
            await direct.push(f"notes/{name}", {"n": 1})
        backup = ("--store", f"file:{service.folder}", "--to", f"file:{tmp_path}/backup")
        assert (await shell.run_async("backup", *backup))[0] == 0
        phone = Phone(Tab(await blank_page(screen, service.url)), service.url)
        await phone.sync()
        clock.now_ms += DAY_MS
        await replace(direct, "notes/changed", {"n": 2})
        await replace(direct, "notes/created", {"n": 2})
        await remove(direct, "notes/removed")
        await phone.synced()
        await phone.window.run("replica.close()")
        clock.now_ms += DAY_MS
        await service.stop()
        shutil.rmtree(service.folder)
        restore = ("--from", f"file:{tmp_path}/backup", "--to", f"file:{service.folder}", "--accept-newer")
        assert (await shell.run_async("backup", "restore", *restore))[0] == 0
        await service.start()
        await replace(direct, "notes/kept", {"n": 3})
        await phone.sync()
        found = [["notes/changed", {"n": 2}], ["notes/created", {"n": 2}], ["notes/kept", {"n": 3}]]
        assert await phone.window.run("replica.entries()") == found
        names = [name async for name in direct.list("notes")]
        assert [[f"notes/{name}", (await direct.pull(f"notes/{name}")).data] for name in names] == found
    await service.stop()
