"""Batch pulls of a client that has some versions already (docs/reference/protocol.md#known-versions)."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.batches import batch, collection, entries, stored
from support.clients import SUBJECT, Browser, Signed, Start, root_device
from support.faulty_store import FaultyStore
from support.watched_store import LOG, MB, OPEN, Watched, WatchedFolder

from pysync.store import ObjectInfo, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

KB = 1024
HIDDEN = {"pay": {"readRoles": ["admin"]}}
SERVICE: dict[str, Any] = {
    "collections": [
        collection("notes", "notes/{id}", writeRoles=["public"]),
        collection("fading", "fading/{id}", writeRoles=["public"], ttlMs=1000),
        collection(
            "cards", "cards/{id}", writeRoles=["public"], fieldPermissions={"pay": {"readRoles": ["admin"]}}
        ),
        collection("log", "log/{id}", writeRoles=["public"], appendOnly=LOG),
    ]
}
OTHER = "0123456789abcdef"


def ids(*names: str) -> list[dict[str, str]]:
    return [{"id": name} for name in names]


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession, store: FaultyStore, now_ms: int) -> Browser:
    return Browser(await start(SERVICE, store, now_ms=lambda: now_ms), session)


async def test_unchanged_entry_has_the_whole_hash_and_no_data(browser: Browser, now_ms: int) -> None:
    first = (await browser.push("notes/a", {"n": 1})).json["hash"]
    params, known = {"notes": ids("a", "b", "a")}, {"notes": [first[:16], OTHER, None]}
    whole = {"data": {"n": 1}, "hash": first, "timestamp": now_ms}
    unchanged = {"unchanged": True, "hash": first, "timestamp": now_ms}
    empty = {"data": {}, "hash": "", "timestamp": now_ms}
    assert entries(await batch(browser, "notes", params=params, known=known), "notes") == [
        unchanged, empty, whole
    ]  # fmt: skip
    second = (await browser.push("notes/a", {"n": 2}, first)).json["hash"]
    changed, _, _ = entries(await batch(browser, "notes", params=params, known=known), "notes")
    assert changed == {"data": {"n": 2}, "hash": second, "timestamp": now_ms}


async def test_reader_who_misses_members_names_the_version_that_it_sees(
    browser: Browser, store: FaultyStore
) -> None:
    await store.put("cards/a", stored({"name": "A", "pay": 1}))
    params = {"cards": ids("a")}
    (seen,) = entries(await batch(browser, "cards", params=params), "cards")
    (unchanged,) = entries(
        await batch(browser, "cards", params=params, known={"cards": [seen["hash"][:16]]}), "cards"
    )
    assert unchanged == {"unchanged": True, "hash": seen["hash"], "timestamp": seen["timestamp"]}
    own = json.loads(stored({"name": "A", "pay": 1}))["hash"]
    assert own != seen["hash"]
    guess = await batch(browser, "cards", params=params, known={"cards": [own[:16]]})
    assert entries(guess, "cards") == [seen], "a right guess at the hidden members looks like a wrong one"


async def test_expired_or_damaged_document_is_no_version(
    browser: Browser, store: FaultyStore, now_ms: int
) -> None:
    old, new = stored({"n": 1}, now_ms - 1001), stored({"n": 2}, now_ms - 1000)
    await store.put("fading/old", old)
    await store.put("fading/new", new)
    await store.put("notes/bad", stored({"n": 3}).replace(b"3", b"4"))
    known = {
        "fading": [json.loads(document)["hash"][:16] for document in (old, new)],
        "notes": [json.loads(stored({"n": 3}))["hash"][:16]],
    }
    params = {"fading": ids("old", "new"), "notes": ids("bad")}
    reply = await batch(browser, "fading", "notes", params=params, known=known)
    expired, fresh = entries(reply, "fading")
    assert expired == {"data": {}, "hash": "", "timestamp": now_ms}
    assert fresh["unchanged"]
    assert entries(reply, "notes") == [{"error": "document_corrupt"}]
    store.fail("get")
    failed = await batch(browser, "notes", params={"notes": ids("bad")}, known={"notes": [OTHER]})
    assert entries(failed, "notes") == [{"error": "store_unavailable"}]


@pytest.mark.parametrize(
    "known",
    [[], {"notes": []}, {"notes": [OTHER]}, {"notes": [OTHER] * 3}, {"notes": [OTHER, OTHER[:15]]},
     {"notes": [OTHER, OTHER.upper()]}, {"notes": [OTHER, 0]}, {"notes": OTHER}, {"gone": ["x"]}],
)  # fmt: skip
async def test_known_of_another_length_or_form_is_rejected(browser: Browser, known: object) -> None:
    answer = await batch(browser, "notes", params={"notes": ids("a", "b")}, known=known)
    assert (answer.error, answer.json["code"]) == ((400, "Invalid known parameter"), "invalid_known")


async def test_logs_and_unknown_collections_ignore_known(browser: Browser) -> None:
    for n in range(3):
        assert (await browser.request("POST", "/push/log/a", {"data": {"n": n}})).status == 200
    params, append = {"log": ids("a"), "gone": ids("a")}, {"log": [{"last": 2}]}
    first = await batch(browser, "log", "gone", params=params, append=append)
    digits = entries(first, "log")[0]["hash"][:16]
    again = await batch(
        browser,
        "log",
        "gone",
        params=params,
        append=append,
        known={"log": [digits], "gone": [OTHER], "x": []},
    )
    assert again.body == first.body


async def test_conditions_and_head_work_with_known_versions(browser: Browser) -> None:
    hash_ = (await browser.push("notes/a", {"n": 1})).json["hash"]
    target = "/batch/pull?collections=notes&params={%22notes%22:[{%22id%22:%22a%22}]}"
    known = f"{target}&known={{%22notes%22:[%22{hash_[:16]}%22]}}"
    unchanged, head = await browser.request("GET", known), await browser.request("HEAD", known)
    tag = unchanged.headers["ETag"]
    assert (head.status, head.body, head.headers["ETag"]) == (200, b"", tag)
    assert (await browser.request("GET", known, headers={"If-None-Match": tag})).status == 304
    assert (await browser.request("GET", target)).headers["ETag"] != tag, "other bodies have other tags"
    await browser.push("notes/a", {"n": 2}, hash_)
    changed = await browser.request("GET", known, headers={"If-None-Match": tag})
    assert entries(changed, "notes")[0]["data"] == {"n": 2}


class Far(Watched):
    """Reads as a bucket does, concurrently, and does not tell sizes without the bodies."""

    is_remote = True

    async def info_many(self, keys: Any) -> dict[str, StoredObject | ObjectInfo | None] | None:
        return None


@pytest.mark.parametrize("kind", [Watched, Far, LocalStore])
async def test_unchanged_documents_count_nothing_towards_the_ceiling(
    start: Start, session: aiohttp.ClientSession, kind: type[Any], tmp_path: Path
) -> None:
    store = await LocalStore.open_folder(tmp_path) if kind is LocalStore else kind()
    notes = {"name": "notes", "storagePath": "notes/{id}", **OPEN}
    browser = Browser(await start({"collections": [notes], "maxBatchBytes": 1000 * KB}, store), session)
    names = [str(n) for n in range(10)]
    for name in names:
        assert (await browser.push(f"notes/{name}", {"text": name * 400 * KB})).status == 200
    pulls = [await browser.pull(f"notes/{name}") for name in names]
    digits: list[str | None] = [pull.json["hash"][:16] for pull in pulls]

    async def statuses(known: list[str | None], *wanted: str) -> list[object]:
        reply = await batch(browser, "notes", params={"notes": ids(*wanted)}, known={"notes": known})
        if reply.status != 200:
            return [reply.json["code"]]
        return ["unchanged" if "unchanged" in entry else "sent" for entry in entries(reply, "notes")]

    assert await statuses(digits, *names) == ["unchanged"] * 10
    assert await statuses([None, *digits[1:9], OTHER], *names) == ["sent", *["unchanged"] * 8, "sent"]
    assert await statuses([None, OTHER, OTHER, *digits[3:]], *names) == ["batch_too_large"]
    # Each entry decides for itself.
    assert await statuses([digits[0], OTHER, None, digits[0]], *"0000") == [
        "unchanged",
        "sent",
        "sent",
        "unchanged",
    ]
    assert await statuses([OTHER, OTHER, None], *"000") == ["batch_too_large"]


async def test_folder_reads_no_unchanged_document(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, now_ms: int
) -> None:
    store = await WatchedFolder.open_folder(tmp_path)
    store.read = []
    clock = [now_ms]
    browser = Browser(await start(SERVICE, store, now_ms=lambda: clock[0]), session)
    keys = ["notes/a", "notes/b", "cards/a", "fading/a"]
    for key in keys:
        assert (await browser.push(key, {"key": key})).status == 200
    params = {"notes": ids("a", "b"), "cards": ids("a"), "fading": ids("a")}
    first = await batch(browser, *params, params=params)
    known = {name: [entry["hash"][:16] for entry in entries(first, name)] for name in params}
    store.read.clear()
    unchanged = await batch(browser, *params, params=params, known=known)
    assert all("unchanged" in entry for name in params for entry in entries(unchanged, name))
    assert store.read == []
    clock[0] += 1001
    (expired,) = entries(await batch(browser, *params, params=params, known=known), "fading")
    assert (expired["hash"], store.read) == ("", ["fading/a"])
    # The folder does not know the hash of what other programs put there, so it reads.
    await store.put("notes/b", stored({"key": "notes/b"}))
    store.read.clear()
    again = await batch(browser, "notes", params=params, known={"notes": known["notes"]})
    assert all("unchanged" in entry for entry in entries(again, "notes"))
    assert store.read == ["notes/b"]


async def test_access_document_that_decides_may_be_unchanged_itself(
    start: Start, session: aiohttp.ClientSession
) -> None:
    access = {"name": "access", "storagePath": "spaces/{spaceId}/_access", "maxBodyBytes": 2 * MB}
    roles = {"readRoles": ["space:member"], "writeRoles": ["space:owner"]}
    members = {"collections": [{**access, **roles}], "auth": {"spaces": {}}, "maxBatchBytes": 100 * KB}
    owner = Signed(await start(members), session, SUBJECT, root_device(SUBJECT))
    document = {"v": 1, "owner": SUBJECT.user_id, "members": [], "name": "x" * 10_000}
    digits = (await owner.push("spaces/s/_access", document)).json["hash"][:16]
    params = {"access": [{"spaceId": "s"}] * 11}
    answer = await batch(owner, "access", params=params, known={"access": [digits] * 6 + [None] * 5})
    assert ["unchanged" in entry for entry in entries(answer, "access")] == [True] * 6 + [False] * 5
    assert (await batch(owner, "access", params=params, known={"access": [None] * 11})).status == 400
