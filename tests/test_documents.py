"""Documents over time: what a repetition is answered, and what a keyring's age does."""

import aiohttp
from conftest import Browser, Start

from pysync.clock import wall_clock_ms
from pysync.testing import MovedClock

PUBLIC = {"readRoles": ["public"], "writeRoles": ["public"]}


async def test_equal_data_of_a_later_write_is_not_taken_for_the_repeated_one(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = MovedClock(wall_clock_ms())
    notes = {"name": "notes", "storagePath": "notes/{id}", **PUBLIC}
    browser = Browser(await start({"collections": [notes]}, now_ms=clock), session)
    once = {"Idempotency-Key": "k1"}
    first = await browser.push("notes/a", {"n": 1}, None, once)
    assert (await browser.push("notes/a", {"n": 1}, None, once)).json == first.json
    clock.now_ms += 1
    second = await browser.push("notes/a", {"n": 2}, first.json["hash"])
    third = await browser.push("notes/a", {"n": 1}, second.json["hash"])
    assert third.json["hash"] == first.json["hash"]
    assert (await browser.push("notes/a", {"n": 1}, None, once)).status == 409


async def test_a_folded_keyring_expires_as_its_own_collection_says(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = MovedClock(wall_clock_ms())
    rooms = {"name": "rooms", "storagePath": "rooms/{room}", **PUBLIC}
    keyrings = {"name": "keyrings", "storagePath": "rooms/{room}/_keyring", "ttlMs": 1000, **PUBLIC}
    browser = Browser(await start({"collections": [rooms, keyrings]}, now_ms=clock), session)
    await browser.push("rooms/a", {"n": 1})
    await browser.push("rooms/a/_keyring", {"k": 1})
    clock.now_ms += 1000
    assert (await browser.pull("rooms/a?withKeyring=1")).json["keyring"]["data"] == {"k": 1}
    clock.now_ms += 1
    folded = await browser.pull("rooms/a?withKeyring=1")
    assert (folded.json["data"], folded.json["keyring"]) == ({"n": 1}, None)
