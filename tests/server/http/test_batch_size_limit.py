"""The ceiling of a batch's answer in bytes, told before bodies are read.

See docs/reference/protocol.md#batch-limits.
"""

import json
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from support.clients import SUBJECT, Browser, Reply, Signed, Start, root_device
from support.watched_store import LOG, MB, OPEN, Watched

from pysync import config
from pysync.store import ObjectInfo, Store, StoredObject

TOO_LARGE = (400, "Batch answer too large")
KB = 1024
COLLECTIONS = [
    {"name": "notes", "storagePath": "notes/{id}", **OPEN},
    {"name": "cards", "storagePath": "cards/{id}", "fieldPermissions": {"pay": {"readRoles": ["x"]}}, **OPEN},
    {"name": "log", "storagePath": "log/{id}", "appendOnly": LOG, **OPEN},
]


class Far(Watched):
    """Does not tell sizes without the bodies, as a bucket."""

    is_remote = True

    async def info_many(self, keys: Any) -> dict[str, StoredObject | ObjectInfo | None] | None:
        return None


@pytest.fixture(params=[Watched, Far])
def watched(request: pytest.FixtureRequest) -> Watched:
    kind: type[Watched] = request.param
    return kind()


async def pulled(browser: Browser, params: dict[str, Any], bounds: Any = None, method: str = "GET") -> Reply:
    query = {"collections": ",".join(params), "params": json.dumps(params)}
    if bounds is not None:
        query["appendParams"] = json.dumps(bounds)
    return await browser.request(method, "/batch/pull?" + urlencode(query))


async def serving(
    start: Start, session: aiohttp.ClientSession, store: Store, max_bytes: int = 100 * KB
) -> Browser:
    members = {"collections": COLLECTIONS, "maxBatchBytes": max_bytes, "maxBatchAppendElements": 100_000}
    return Browser(await start(members, store), session)


async def fill(browser: Browser, key: str, size: int) -> None:
    assert (await browser.push(key, {"text": "x" * size})).status == 200


def test_the_ceiling_is_32_mib_unless_configured() -> None:
    assert config.parse({"version": 1, "store": "memory:"}).max_batch_bytes == 32 * MB


async def test_documents_are_rejected_above_the_ceiling_and_served_below(
    start: Start, session: aiohttp.ClientSession, watched: Watched
) -> None:
    browser = await serving(start, session, watched)
    ids = [{"id": str(n)} for n in range(11)]
    for each in ids:
        await fill(browser, f"notes/{each['id']}", 10_000)
    served = await pulled(browser, {"notes": ids[:10]})
    assert (served.status, len(served.json["collections"]["notes"])) == (200, 10)
    for method in ("GET", "HEAD"):
        rejected = await pulled(browser, {"notes": ids}, method=method)
        assert rejected.status == 400
        if method == "GET":
            assert rejected.error == TOO_LARGE
            assert rejected.json["code"] == "batch_too_large"
            assert rejected.headers["Cache-Control"] == "no-store"


async def test_a_document_counts_as_often_as_it_is_sent_and_is_read_once(
    start: Start, session: aiohttp.ClientSession, watched: Watched
) -> None:
    browser = await serving(start, session, watched)
    await fill(browser, "notes/a", 10_000)
    watched.forget()
    served = await pulled(browser, {"notes": [{"id": "a"}] * 10})
    assert [each["data"] for each in served.json["collections"]["notes"]] == [{"text": "x" * 10_000}] * 10
    assert watched.read == ["notes/a"]
    assert (await pulled(browser, {"notes": [{"id": "a"}] * 11})).error == TOO_LARGE


async def test_access_documents_that_were_read_for_roles_count_too(
    start: Start, session: aiohttp.ClientSession, watched: Watched
) -> None:
    access = {"name": "access", "storagePath": "spaces/{spaceId}/_access", "maxBodyBytes": 2 * MB}
    roles = {"readRoles": ["space:member"], "writeRoles": ["space:owner"]}
    members = {"collections": [{**access, **roles}], "auth": {"spaces": {}}, "maxBatchBytes": 100 * KB}
    owner = Signed(await start(members, watched), session, SUBJECT, root_device(SUBJECT))
    document = {"v": 1, "owner": SUBJECT.user_id, "members": [], "name": "x" * 10_000}
    assert (await owner.push("spaces/s/_access", document)).status == 200
    assert (await pulled(owner, {"access": [{"spaceId": "s"}] * 9})).status == 200
    for method in ("GET", "HEAD"):
        assert (await pulled(owner, {"access": [{"spaceId": "s"}] * 11}, method=method)).status == 400


async def test_hidden_members_do_not_lift_the_ceiling(
    start: Start, session: aiohttp.ClientSession, watched: Watched
) -> None:
    browser = await serving(start, session, watched)
    await fill(browser, "cards/a", 10_000)
    assert (await pulled(browser, {"cards": [{"id": "a"}] * 10})).status == 200
    assert (await pulled(browser, {"cards": [{"id": "a"}] * 11})).error == TOO_LARGE


async def test_many_large_documents_are_rejected_before_they_are_read(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Watched()
    browser = await serving(start, session, store, 8 * MB)
    ids = [{"id": str(n)} for n in range(10)]
    for each in ids:
        await fill(browser, f"notes/{each['id']}", 900_000)
    for method in ("GET", "HEAD"):
        store.forget()
        assert (await pulled(browser, {"notes": ids}, method=method)).status == 400
        assert store.size < 2 * MB, "a first megabyte, and one document more"
    store.forget()
    assert (await pulled(browser, {"notes": [{"id": "0"}] * 10})).error == TOO_LARGE
    assert len(store.read) <= 1


async def chat(browser: Browser, key: str, count: int, size: int) -> None:
    for n in range(count):
        pushed = await browser.request("POST", f"/push/{key}", {"data": {"n": n, "text": "x" * size}})
        assert pushed.status == 200


@pytest.mark.parametrize("size", [300, 9_000])
async def test_overlapping_tails_of_a_log_share_its_segments_and_count_each(
    start: Start, session: aiohttp.ClientSession, watched: Watched, size: int
) -> None:
    count = 9_000 // size * 5
    browser = await serving(start, session, watched, 120 * KB)
    await chat(browser, "log/a", count, size)
    watched.forget()
    bounds = [{"last": count}, {"last": count - 1}]
    served = await pulled(browser, {"log": [{"id": "a"}] * 2}, {"log": bounds})
    first, second = (entry["data"]["items"] for entry in served.json["collections"]["log"])
    assert [each["data"]["n"] for each in first] == list(range(count))
    assert second == first[1:]
    segments = [key for key in watched.read if key.startswith("_pysync/logs/")]
    assert len(segments) > 3
    assert len(segments) == len(set(segments)), "each once"
    more = {"log": [*bounds, {"last": count, "since": 0}]}
    assert (await pulled(browser, {"log": [{"id": "a"}] * 3}, more)).error == TOO_LARGE
    same = await pulled(browser, {"log": [{"id": "a"}] * 3}, {"log": [{"last": count}] * 3})
    assert same.error == TOO_LARGE, "one read, sent three times"


async def test_tails_are_rejected_before_segments_are_read(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Watched()
    browser = await serving(start, session, store, MB)
    await chat(browser, "log/a", 30, 100 * KB)
    store.forget()
    for method in ("GET", "HEAD"):
        rejected = await pulled(browser, {"log": [{"id": "a"}]}, {"log": [{"last": 12}]}, method)
        assert rejected.status == 400
    assert not [key for key in store.read if key.startswith("_pysync/logs/") and "index" not in key]
    assert (await pulled(browser, {"log": [{"id": "a"}]}, {"log": [{"last": 9}]})).status == 200


async def test_store_without_sizes_reads_tails_no_further_than_the_ceiling(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Far()
    browser = await serving(start, session, store, MB)
    await chat(browser, "log/a", 60, 100 * KB)
    store.forget()
    assert (await pulled(browser, {"log": [{"id": "a"}]}, {"log": [{"last": 60}]})).error == TOO_LARGE
    assert store.size < 2.5 * MB


async def test_a_small_part_of_large_segments_is_served_below_a_low_ceiling(
    start: Start, session: aiohttp.ClientSession, watched: Watched
) -> None:
    """The bytes that would be sent count, not the segments that they lie in."""
    browser = await serving(start, session, watched, 20 * KB)
    await chat(browser, "log/a", 200, 300)
    newest = await pulled(browser, {"log": [{"id": "a"}] * 40}, {"log": [{"last": 1}] * 40})
    assert newest.status == 200
    whole = await pulled(browser, {"log": [{"id": "a"}]}, {"log": [{"last": 200}]})
    assert whole.error == TOO_LARGE
    every = (await browser.pull("log/a?full=true")).json["data"]["items"]
    middle = [{"since": every[n]["ts"], "limit": 200 - n - 1} for n in range(195, 199)]
    served = await pulled(browser, {"log": [{"id": "a"}] * 4}, {"log": middle})
    got = [entry["data"]["items"] for entry in served.json["collections"]["log"]]
    assert got == [every[n + 1 :] for n in range(195, 199)]


async def test_documents_and_tails_count_together(
    start: Start, session: aiohttp.ClientSession, watched: Watched
) -> None:
    browser = await serving(start, session, watched, 100 * KB)
    await fill(browser, "notes/a", 60 * KB)
    await chat(browser, "log/a", 10, 6 * KB)
    params = {"notes": [{"id": "a"}], "log": [{"id": "a"}]}
    assert (await pulled(browser, params, {"log": [{"last": 6}]})).status == 200
    assert (await pulled(browser, params, {"log": [{"last": 7}]})).error == TOO_LARGE
