"""A folder and a bucket that version 0.1.0 wrote, and was killed in, are served without a loss.

`data/make.py` has made the archives with that version.
"""

import json
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.session import Session
from components import S3Server
from contracts.feeds import keys_of
from support.cli_runner import Shell
from support.clients import ISSUER, SUBJECT, Browser, Signed, Start
from support.event_batches import listed, pushed
from support.s3_stores import new_prefix
from support.sse_client import Listen

from pysync.auth import certificates
from pysync.concurrency import closing
from pysync.config import parse
from pysync.store import open_store
from pysync.testing import FakeClock

DATA = Path(__file__).parent / "data"
FILE = b"a file of version 0.1.0\n" * 4000


class Old:
    """What version 0.1.0 left: the store, and what it said last."""

    def __init__(self, kind: str, members: dict[str, Any]) -> None:
        self.said = json.loads((DATA / f"{kind}.json").read_text())
        self.clock = FakeClock(self.said["now_ms"])
        self.members = {**json.loads((DATA / "config.json").read_text()), **members}


def unpack_folder(folder: Path) -> dict[str, Any]:
    with tarfile.open(DATA / "folder.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return {"store": f"file:{folder}/data"}


def unpack_bucket(server: S3Server) -> dict[str, Any]:
    client = Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
    )
    prefix = new_prefix()
    with tarfile.open(DATA / "bucket.tar.gz") as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None
            client.put_object(
                Bucket=server.bucket,
                Key=entry.name.replace("old", prefix, 1),
                Body=file.read(),
                ContentType=entry.pax_headers["type"],
                Metadata=json.loads(entry.pax_headers["metadata"]),
            )
    client.close()
    store = {
        "url": f"s3://{server.bucket}/{prefix}",
        "endpoint": server.endpoint,
        "region": server.region,
        "accessKeyId": server.access_key_id,
        "secretAccessKey": server.secret_access_key,
    }
    return {"store": store}


@pytest.fixture(params=["folder", "moto"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Old:
    if request.param == "folder":
        return Old("folder", unpack_folder(tmp_path))
    return Old("bucket", unpack_bucket(request.getfixturevalue("moto")))


@pytest.fixture
def old_folder(tmp_path: Path) -> Old:
    return Old("folder", unpack_folder(tmp_path))


Serve = Callable[[Old], Awaitable[Browser]]


@pytest.fixture
def serve(start: Start, session: aiohttp.ClientSession) -> Serve:
    async def serve(old: Old) -> Browser:
        return Browser(await start(old.members, now_ms=old.clock), session)

    return serve


def signed(old: Old, browser: Browser, *, lost: bool = False, **options: Any) -> Signed:
    """The caller of that time, with the certificate of that time, which for `lost` was revoked."""
    certificate = certificates.parse(old.said["lost_certificate" if lost else "certificate"].encode())
    keys = SUBJECT if lost else ISSUER
    return Signed(browser.base, browser.session, keys, certificate, ts_ms=old.clock(), **options)


async def test_everything_of_version_0_1_0_is_served(old: Old, serve: Serve) -> None:
    browser = await serve(old)
    for path, said in old.said["answers"].items():
        answer = await browser.request("GET", path)
        assert answer.status == 200
        assert {name: value for name, value in answer.json.items() if name != "timestamp"} == said
    log = (await browser.pull("logs/long?last=300")).json["data"]["items"]
    assert [element["data"]["n"] for element in log] == [*range(300)]
    file = await browser.pull("files/text")
    assert (file.body, file.headers["Content-Type"]) == (FILE, "text/plain")
    diary = await signed(old, browser).pull(old.said["private"])
    assert diary.json["data"] == {"secret": 1}


async def test_everything_in_a_folder_of_version_0_1_0_is_in_the_feed(
    old_folder: Old, tmp_path: Path
) -> None:
    async with closing(open_store(parse(old_folder.members).store, old_folder.clock)) as store:
        keys = [entry.key async for entry in store.walk("") if not entry.key.startswith("_pysync/")]
        assert {"notes/a", "logs/long", "files/text", old_folder.said["private"]} <= {*keys}
        assert store.transactional is not None
        feed = store.transactional.feed
        assert sorted(await keys_of(feed, limit=3)) == sorted(keys)
        assert sorted(await keys_of(feed, "", 3, "notes")) == sorted(
            key for key in keys if key.startswith("notes/")
        )


async def test_everything_of_version_0_1_0_can_be_written(old: Old, serve: Serve) -> None:
    browser = await serve(old)
    last = old.said["last"]["hash"]
    written = await browser.push("notes/a", {"title": "new"}, last)
    assert written.status == 200
    assert (await browser.push("notes/a", {"title": "newer"}, last)).status == 409
    assert (await browser.pull("notes/a")).json["hash"] == written.json["hash"]
    assert (await signed(old, browser).push(old.said["private"], {}, "0" * 64)).status == 409
    assert (await browser.push("logs/long", {"n": 300})).status == 200
    newest = (await browser.pull("logs/long?last=2")).json["data"]["items"]
    assert [element["data"]["n"] for element in newest] == [299, 300]
    answer = await browser.request("POST", "/push/files/text", b"new", {"Content-Type": "text/plain"})
    assert answer.status == 200
    assert (await browser.pull("files/text")).body == b"new"
    await pushed(browser, {"message_id": "new"}, app="one")
    assert len(await listed(browser, "one")) == 2


async def test_a_merge_that_version_0_1_0_was_killed_in_is_ended(
    old: Old, serve: Serve, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(old.members))
    assert (await shell.run_async("events", "compact", "--config", "c.json"))[0] == 0
    browser = await serve(old)
    (name,) = await listed(browser, "killed")
    rows = pq.read_table(pa.BufferReader((await browser.pull(f"events/killed/{name}")).body))
    assert rows.column("message_id").to_pylist() == ["killed-0", "killed-1", "killed-2"]


async def test_a_certificate_revoked_with_version_0_1_0_stays_revoked(old: Old, serve: Serve) -> None:
    browser = await serve(old)
    assert (await signed(old, browser, lost=True).pull(old.said["private"])).status == 401


async def test_a_request_that_version_0_1_0_accepted_is_rejected(old_folder: Old, serve: Serve) -> None:
    browser = await serve(old_folder)
    again = signed(old_folder, browser, nonce=old_folder.said["nonce"].encode())
    assert (await again.pull(old_folder.said["private"])).status == 401
    assert (await signed(old_folder, browser).pull(old_folder.said["private"])).status == 200


async def test_a_stream_resumes_at_a_cursor_of_version_0_1_0(
    old_folder: Old, serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(old_folder)
    stream = await subscribe(
        browser, headers={"Last-Event-ID": old_folder.said["place"]}, collections="notes"
    )
    delivered = await stream.event()
    assert (delivered.data["params"], delivered.data["hash"]) == (
        {"id": "a"},
        old_folder.said["last"]["hash"],
    )


async def test_everything_of_version_0_1_0_is_counted(old: Old, serve: Serve, start: Start) -> None:
    old.members["quotas"] = {}
    browser = await serve(old)
    counter: Any = start.apps[-1].usage_count  # type: ignore[attr-defined]
    await counter.run_if_needed()
    usage = (await signed(old, browser).request("GET", "/usage")).json
    assert usage["complete"] is True
    assert usage["used"]["documents"] == 1
    assert usage["used"]["bytes"] > 0
