"""Cursors of before a restore, a copy, or a database that was put back are worth nothing afterwards."""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from components import RedisServer, S3Server
from support.backups import MemoryTarget, back_up, newest, source_of
from support.cli_runner import Shell
from support.clients import Browser, Start
from support.collections import collection
from support.s3_stores import new_prefix
from support.sse_client import Listen

from pysync.backup.format import parse_time
from pysync.backup.restore import Restorer
from pysync.backup.snapshot import Repository
from pysync.coordinator import open_coordinator
from pysync.store import open_store

Serve = Callable[[str], Awaitable[Browser]]
"""Ends the service, and starts another: on a folder below the test's own, or, given as `coordinator#prefix`,
on a prefix of the bucket."""


@pytest.fixture
def serve(
    start: Start, session: aiohttp.ClientSession, request: pytest.FixtureRequest, tmp_path: Path
) -> Serve:
    async def serve_at(place: str) -> Browser:
        apps = start.apps  # type: ignore[attr-defined]
        for app in apps[-1:]:
            await app.close()
        members: dict[str, Any] = {"collections": [collection("notes")]}
        if "#" not in place:
            return Browser(await start(members | {"store": f"file:{tmp_path / place}"}), session)
        moto: S3Server = request.getfixturevalue("moto")
        coordinator, _, prefix = place.rpartition("#")
        store = await open_store(moto.store(prefix))
        return Browser(await start(members | {"coordinator": coordinator}, store), session)

    return serve_at


async def write(browser: Browser, *names: str) -> None:
    """Write documents, each twice."""
    for name in names * 2:
        base_hash = (await browser.pull(f"notes/{name}")).json["hash"] or None
        assert (await browser.push(f"notes/{name}", {"n": name}, base_hash)).status == 200


async def pages(browser: Browser, since: str = "") -> list[dict[str, Any]]:
    """The pages of the feed from a cursor to its end, or its reset."""
    found = list[dict[str, Any]]()
    while not found or found[-1].get("hasMore"):
        cursor = found[-1]["cursor"] if found else since
        page = await browser.request("GET", f"/changes?limit=2{cursor and '&since='}{cursor}")
        assert page.status == 200, page.body
        found.append(page.json)
    return found


async def cursors(browser: Browser, subscribe: Listen) -> set[str]:
    """Every kind of cursor that the service gives now: that of a new stream, of an event, and of pages."""
    stream = await subscribe(browser, collections="notes")
    begun = (await stream.block()).id
    await write(browser, "seen")
    return {begun, (await stream.event()).id, *(page["cursor"] for page in await pages(browser))}


async def check_reset(browser: Browser, subscribe: Listen, known: set[str]) -> None:
    """Check that none of these cursors is taken for one of this service, and that those of resets are."""
    for cursor in known:
        stream = await subscribe(browser, headers={"Last-Event-ID": cursor}, collections="notes")
        assert (await stream.event()).data == {"reset": True}, cursor
        (reset,) = await pages(browser, cursor)
        assert reset.keys() == {"reset", "cursor"}, cursor
        assert await pages(browser, reset["cursor"]) == [{"changes": [], "cursor": reset["cursor"]}]


@pytest.mark.parametrize("way", ["restore", "copy"])
async def test_no_cursor_of_a_folder_survives_a_restore_or_a_copy(
    serve: Serve, subscribe: Listen, shell: Shell, way: str
) -> None:
    browser = await serve("data")
    await write(browser, "a", "b", "c")
    early = await cursors(browser, subscribe)
    commands = {
        "restore": (
            ("backup", "--store", "file:data", "--to", "file:backup"),
            ("backup", "restore", "--from", "file:backup", "--to", "file:new"),
        ),
        "copy": (("copy", "file:data", "file:new"),),
    }[way]
    for command in commands:
        assert (await shell.run_async(*command))[0] == 0
    await write(browser, "lost")
    late = await cursors(browser, subscribe)
    browser = await serve("new")
    await check_reset(browser, subscribe, early | late)
    await write(browser, *(f"new-{n}" for n in range(9)))
    await check_reset(browser, subscribe, early | late)


async def test_a_reset_has_the_time_of_a_restore_that_accepts_newer_versions(
    serve: Serve, subscribe: Listen, shell: Shell
) -> None:
    browser = await serve("data")
    await write(browser, "a", "b", "c")
    known = await cursors(browser, subscribe)
    assert (await shell.run_async("backup", "--store", "file:data", "--to", "file:backup"))[0] == 0
    known |= await cursors(browser, subscribe)
    restore = ("backup", "restore", "--from", "file:backup", "--to", "file:new", "--accept-newer")
    status, printed, _ = await shell.run_async(*restore)
    assert status == 0
    browser = await serve("new")
    for cursor in known:
        (reset,) = await pages(browser, cursor)
        assert reset["restored"] == parse_time(json.loads(printed)["time"])
        assert all("reset" not in page for page in await pages(browser, reset["cursor"]))
    ((number, _, _),) = [page["cursor"].partition("-") for page in await pages(browser, "now")]
    (later,) = await pages(browser, f"{int(number) + 1:017d}-00000000")
    assert later.keys() == {"reset", "cursor"}, "of a loss after the restore"


async def test_no_cursor_survives_a_copy_into_the_store_that_is_served(
    serve: Serve, subscribe: Listen, shell: Shell
) -> None:
    await write(await serve("other"), "a")
    browser = await serve("data")
    await write(browser, "b")
    known = await cursors(browser, subscribe)
    assert (await shell.run_async("copy", "file:other", "file:data"))[0] == 0
    await check_reset(browser, subscribe, known)
    await write(browser, "c")
    await check_reset(browser, subscribe, known)


@pytest.mark.parametrize("kind", ["folder", pytest.param("bucket", marks=pytest.mark.slow)])
async def test_a_database_that_is_put_back_from_a_copy_knows_none_of_the_lost_cursors(
    serve: Serve, subscribe: Listen, tmp_path: Path, kind: str
) -> None:
    """Also if more was written since than was lost, so that it has such ids. Earlier cursors stay valid."""
    folder = tmp_path / "data"
    place = "data" if kind == "folder" else f"file:{folder}#{new_prefix()}"
    browser = await serve(place)
    await write(browser, "a", "b", "c")
    early = await cursors(browser, subscribe)
    await start_elsewhere(serve)
    shutil.copytree(folder, tmp_path / "older")
    browser = await serve(place)
    await write(browser, "lost", "lost-2")
    late = await cursors(browser, subscribe) - early
    assert late
    await start_elsewhere(serve)
    shutil.rmtree(folder)
    (tmp_path / "older").rename(folder)
    browser = await serve(place)
    await check_reset(browser, subscribe, late)
    await write(browser, *(f"new-{n}" for n in range(9)))
    await check_reset(browser, subscribe, late)
    for cursor in early:
        assert all("reset" not in page for page in await pages(browser, cursor)), cursor


async def start_elsewhere(serve: Serve) -> None:
    """End the service that runs."""
    await serve("elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "redis"])
async def test_no_cursor_of_a_bucket_survives_a_restore(
    serve: Serve, subscribe: Listen, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """Also of servers that go on with the same coordinator."""
    server: RedisServer | None = request.getfixturevalue("redis") if kind == "redis" else None
    url = f"file:{tmp_path}/coordinator" if server is None else server.url
    moto: S3Server = request.getfixturevalue("moto")
    old, new = new_prefix(), new_prefix()
    browser = await serve(f"{url}#{old}")
    await write(browser, "a", "b", "c")
    early = await cursors(browser, subscribe)
    target = MemoryTarget()
    source = await open_store(moto.store(old))
    await back_up(source_of(source), target)
    await source.close()
    await write(browser, "lost")
    late = await cursors(browser, subscribe)
    await start_elsewhere(serve)
    coordinator, into = await open_coordinator(url), await open_store(moto.store(new))
    repository = await Repository.open(target)
    await Restorer(repository, into, print, coordinator).restore(await newest(repository))
    await coordinator.close()
    await into.close()
    browser = await serve(f"{url}#{new}")
    await check_reset(browser, subscribe, early | late)
    await write(browser, *(f"new-{n}" for n in range(9)))
    await check_reset(browser, subscribe, early | late)
