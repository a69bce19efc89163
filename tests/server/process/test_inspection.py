"""Operators see what is stored, who wrote it and what changed last, and never the data."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
import pytest
from support.bit_rot import rot, rot_rows
from support.cli_service import ADMIN_TOKEN
from support.clients import SUBJECT, Browser, Signed, Start, root_device
from support.collections import LOG, MINE, NOTES, OWN, UNSIGNED, collection

from pysync.auth.certificates import user_id
from pysync.cli.main import main
from pysync.server.process.logs import MAX_SHOWN
from pysync.server.process.metrics import RECENT
from pysync.server.process.operator_action import AdminRequest

ME = user_id(SUBJECT.ed_pub)
PICS = collection("pics", allowedMimeTypes=["image/png"])
KEPT = collection("kept", "kept/{identity}/{id}", history={}, deletable=True, **OWN)
MEMBERS: dict[str, Any] = {
    "auth": {"adminToken": ADMIN_TOKEN},
    "collections": [NOTES, MINE, PICS, LOG, KEPT],
    "namespaces": {"acme": {"collections": [collection("pads", "notes/{pad}")]}},
}
SECRET = "what only its reader may know"

Inspect = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["folder", "memory"])
def members(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A service on a store with transactions, or on one whose changes the coordinator has."""
    return MEMBERS | {"store": f"file:{tmp_path}/data" if request.param == "folder" else "memory:"}


@pytest.fixture
def inspect(start: Start) -> Inspect:
    """Return the JSON at an operators' page of the service that was started last."""

    async def page(path: str, query: str = "", status: int = 200, token: str = ADMIN_TOKEN) -> Any:
        pages = start.apps[-1].admin_pages  # type: ignore[attr-defined]
        headers = {"host": "localhost", "authorization": f"Bearer {token}"}
        request = AdminRequest("GET", path, headers, query=query)
        response = await asyncio.to_thread(pages.respond, request)
        assert response.status == status, response.content
        assert SECRET.encode() not in response.content
        return orjson.loads(response.content)

    return page


async def test_newest_changes_come_first_with_their_writers(
    start: Start, session: aiohttp.ClientSession, members: dict[str, Any], inspect: Inspect
) -> None:
    base = await start(members)
    anyone, owner = Browser(base, session), Signed(base, session, SUBJECT, root_device(SUBJECT))
    written = [(await anyone.push(f"notes/{n}", {"text": SECRET})).json for n in range(101)]
    mine = (await owner.push(f"u/{ME}/a", {"text": SECRET})).json
    newest, *others = (await inspect("/admin/changes"))["changes"]
    assert newest.pop("id") > others[0]["id"]
    assert newest == {
        "collection": "mine",
        "params": {"identity": ME, "id": "a"},
        "key": f"u/{ME}/a",
        "writer": ME,
        **mine,
    }
    assert [(each["hash"], each["writer"]) for each in others] == [
        (each["hash"], None) for each in written[:1:-1]
    ]


async def test_a_document_is_described_with_its_writer_and_its_collections(
    start: Start, session: aiohttp.ClientSession, members: dict[str, Any], inspect: Inspect
) -> None:
    base = await start(members)
    written = (await Browser(base, session).push("notes/a", {"text": SECRET})).json
    found = await inspect("/admin/object", "key=notes/a")
    assert (found["kind"], found["hash"], found["timestamp"]) == (
        "document",
        written["hash"],
        written["timestamp"],
    )
    assert found["size"] > len(SECRET)
    assert found["modified"] >= written["timestamp"]
    assert (found["damage"], found["writer"], found["history"]) == (None, None, [])
    assert found["change"]["hash"] == written["hash"]
    assert found["collections"] == [
        {"name": "notes", "params": {"id": "a"}},
        {"name": "acme/pads", "params": {"pad": "a"}},
    ]
    owner = Signed(base, session, SUBJECT, root_device(SUBJECT))
    await owner.push(f"u/{ME}/a", {})
    assert (await inspect("/admin/object", f"key=u/{ME}/a"))["writer"] == ME


async def test_earlier_versions_of_a_document_are_listed_with_their_writers(
    start: Start, session: aiohttp.ClientSession, members: dict[str, Any], inspect: Inspect
) -> None:
    owner = Signed(await start(members), session, SUBJECT, root_device(SUBJECT))
    key, versions, base = f"kept/{ME}/a", [], None
    for n in range(3):
        versions.append((await owner.push(key, {"n": n, "text": SECRET}, base)).json)
        base = versions[-1]["hash"]
    history = (await inspect("/admin/object", f"key={key}"))["history"]
    assert [{name: each[name] for name in ("hash", "timestamp")} for each in history] == versions[1::-1]
    assert {each["writer"] for each in history} == {ME}
    assert [each["replaced"] for each in history] == [each["timestamp"] for each in versions[:0:-1]]
    removed = await owner.request("DELETE", f"/push/{key}?baseHash={base}")
    assert removed.status == 200
    gone = await inspect("/admin/object", f"key={key}")
    assert (gone["kind"], gone["change"]["removed"], len(gone["history"])) == (None, True, 3)


async def test_files_and_logs_are_described_with_their_writers(
    start: Start, session: aiohttp.ClientSession, members: dict[str, Any], inspect: Inspect
) -> None:
    pics = collection("pics", "pics/{identity}/{id}", allowedMimeTypes=["image/png"], **OWN)
    log = collection("log", "log/{identity}/{id}", appendOnly=UNSIGNED, **OWN)
    base = await start(members | {"collections": [pics, log]})
    owner, picture = Signed(base, session, SUBJECT, root_device(SUBJECT)), SECRET.encode()
    target = f"/push/pics/{ME}/a"
    signed = owner.headers("POST", target, b"")  # of a file, clients sign no byte
    png = {"Content-Type": "image/png", **signed}
    sent = await Browser(base, session).request("POST", target, picture, png)
    found = await inspect("/admin/object", f"key=pics/{ME}/a")
    assert (found["kind"], found["size"], found["contentType"]) == ("file", len(picture), "image/png")
    assert (found["hash"], found["damage"], found["writer"]) == (sent.json["hash"], None, ME)
    for n in range(3):
        sent = await owner.request("POST", f"/push/log/{ME}/a", {"data": {"n": n, "text": SECRET}})
    found = await inspect("/admin/object", f"key=log/{ME}/a")
    assert (found["kind"], found["elements"], found["hash"]) == ("log", 3, sent.json["hash"])
    assert (found["timestamp"], found["writer"]) == (sent.json["timestamp"], ME)


async def test_damage_of_an_object_is_named(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, inspect: Inspect
) -> None:
    browser = Browser(await start(MEMBERS | {"store": f"file:{tmp_path}/data"}), session)
    await browser.push("notes/a", {"text": SECRET})
    await browser.request("POST", "/push/pics/a", b"bytes", {"Content-Type": "image/png"})
    rot_rows(tmp_path / "data", "notes/a")
    rot(tmp_path / "data/files/pics/a")
    found = await inspect("/admin/object", "key=notes/a")
    assert (found["kind"], found["damage"]) == (
        "document",
        "it is not a document, or not the one that was stored",
    )
    (tmp_path / "data/files/pics/a").unlink()
    found = await inspect("/admin/object", "key=pics/a")
    assert found["kind"] == "file"
    assert "gone" in found["damage"] or "lost" in found["damage"]


async def test_a_key_without_an_object_is_described_too(
    start: Start, members: dict[str, Any], inspect: Inspect
) -> None:
    await start(members)
    found = await inspect("/admin/object", "key=notes%2Fa")
    assert (found["key"], found["kind"], found["change"]) == ("notes/a", None, None)
    assert [each["name"] for each in found["collections"]] == ["notes", "acme/pads"]
    assert (await inspect("/admin/object", "key=nowhere/" + quote("\u20ac")))["collections"] == []
    for query in ("", "key=", "key=a//b", "key=a/../b"):
        rejected = await inspect("/admin/object", query, status=400)
        assert rejected["code"] == "bad_request"


@pytest.mark.parametrize("page", ["/admin/changes", "/admin/object", "/admin/damage", "/admin/refusals"])
async def test_pages_that_name_keys_need_the_admin_token(
    start: Start, members: dict[str, Any], inspect: Inspect, page: str
) -> None:
    await start(members)
    assert (await inspect(page, "key=a", status=401, token="wrong"))["code"] == "unauthorized"
    await start({**members, "auth": {}, "store": "memory:"})
    assert (await inspect(page, "key=a", status=403))["code"] == "forbidden"


async def test_collections_come_with_their_roles_and_the_warnings_of_check(
    start: Start, inspect: Inspect
) -> None:
    await start({**MEMBERS, "collections": [NOTES, LOG, collection("odd", readRoles=["nobody-has-it"])]})
    found = await inspect("/admin/collections", token="none")
    notes, log, odd, pads = found["collections"]
    assert notes == {
        "name": "notes",
        "kind": "documents",
        "storagePath": "notes/{id}",
        "readRoles": ["public"],
        "writeRoles": ["public"],
    }
    assert (log["kind"], odd["readRoles"], pads["name"]) == ("log", ["nobody-has-it"], "acme/pads")
    assert [each for each in found["warnings"] if "nobody-has-it" in each["message"]]


async def test_damaged_objects_are_listed_with_the_last_scrub_and_verification(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, inspect: Inspect
) -> None:
    browser = Browser(await start(MEMBERS | {"store": f"file:{tmp_path}/data"}), session)
    assert await inspect("/admin/damage") == {"objects": [], "scrub": None, "verify": None}
    for key in ("notes/a", "notes/b"):
        await browser.push(key, {"text": SECRET})
    rot_rows(tmp_path / "data", "notes/a", "notes/b")
    for key in ("notes/a", "notes/b", "notes/a"):
        assert (await browser.pull(key)).status == 500
    newest, other = (await inspect("/admin/damage"))["objects"]
    assert newest["timestamp"] >= other["timestamp"]
    assert (newest["key"], newest["kind"], newest["foundBy"]) == ("notes/a", "document", "request")
    assert newest["why"]
    assert other["key"] == "notes/b"
    scrubber = start.apps[-1].jobs.scrubber  # type: ignore[attr-defined]
    await scrubber.run_once()
    found = await inspect("/admin/damage")
    assert {each["foundBy"] for each in found["objects"]} == {"scrub"}
    assert (found["scrub"]["damaged"], found["verify"]) == (2, None)


async def test_a_verification_of_the_whole_store_is_shown(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, inspect: Inspect
) -> None:
    url = f"file:{tmp_path}/data"
    browser = Browser(await start(MEMBERS | {"store": url}), session)
    await browser.push("notes/a", {})
    (tmp_path / "pysync.json").write_text(orjson.dumps({"version": 1, "store": url}).decode())
    assert await asyncio.to_thread(main, ["verify", "--config", str(tmp_path / "pysync.json")]) == 0
    verify = (await inspect("/admin/damage"))["verify"]
    assert verify["finishedMs"] > 0
    assert (verify["objects"], verify["damaged"]) == (1, 0)


async def test_the_check_that_refused_a_request_is_found_by_its_id(
    start: Start, session: aiohttp.ClientSession, inspect: Inspect
) -> None:
    browser = Browser(await start(MEMBERS), session)
    for n in range(3):
        headers = {"Authorization": "Bearer wrong", "X-Request-Id": f"r{n}"}
        assert (await browser.pull(f"u/{ME}/{n}", headers)).status == 401
    assert (await browser.pull("notes/a")).status == 200
    (found,) = (await inspect("/admin/refusals", "requestId=r1"))["refusals"]
    assert found.pop("timestamp") > 0
    assert found == {
        "requestId": "r1",
        "status": 401,
        "check": "admin token",
        "method": "GET",
        "path": f"/pull/u/{ME}/1",
    }
    shown = (await inspect("/admin/refusals", "last=2"))["refusals"]
    assert [each["requestId"] for each in shown] == ["r2", "r1"]
    assert len((await inspect("/admin/refusals"))["refusals"]) == 3
    assert await inspect("/admin/refusals", "requestId=unknown") == {"refusals": []}
    for last in ("0", "-1", "x", "1" * 5000):
        await inspect("/admin/refusals", f"last={last}", status=400)


async def test_refusals_contain_no_secrets_and_are_bounded(
    start: Start, session: aiohttp.ClientSession, inspect: Inspect
) -> None:
    members = MEMBERS | {"server": {"publicHosts": ["api.example"]}}
    browser = Browser(await start(members), session)
    target = f"/{'x' * 500}?token={quote(SECRET)}"
    headers = {"Authorization": f"Bearer {SECRET}", "Host": "y" * 500, "X-Request-Id": "first"}
    for n in range(RECENT + 1):
        assert (await browser.request("GET", target, headers=headers)).status == 421
        headers["X-Request-Id"] = f"r{n}"
    shown = (await inspect("/admin/refusals", "last=9999"))["refusals"]
    assert len(shown) == RECENT
    assert {len(each["path"]) for each in shown} == {len(each["check"]) for each in shown} == {MAX_SHOWN}
    assert "first" not in {each["requestId"] for each in shown}
    assert quote(SECRET) not in str(shown)
