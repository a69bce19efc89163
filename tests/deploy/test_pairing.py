"""Devices join by a code, as the published `starfish-spaces` does it, over the collections of the example."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from support.change_pages import pages
from support.clients import Browser, Start
from support.configurations import EXAMPLE
from support.sse_client import Listen

from pysync.clock import wall_clock_ms
from pysync.testing import FakeClock

pytestmark = [pytest.mark.process, pytest.mark.slow]

EVERY = json.loads(EXAMPLE.read_text())["collections"]
COLLECTIONS = [one for one in EVERY if one["name"] in ("_pairing", "notebooks")]
# A device asks at a code. The owner, who has read the code from its screen, looks the request up and grants
# it a certificate for notebooks, sealed to the device. Another request waits at the code that is printed.
PROGRAM = """
import asyncio
import hashlib
import json
import sys

from starfish_identities import generate_device_keys
from starfish_identities.pairing import mint_device_cap, scopes as device_scopes
from starfish_sharing.cap_mint import mint_member_cap, scopes
from starfish_spaces import join_request as join
from starfish_spaces.client import make_space_client


def user_id(key):
    return hashlib.sha256(bytes.fromhex(key)).hexdigest()[:32]


async def is_refused(doing):
    try:
        await doing
    except join.SpaceJoinConflictError:
        return True
    return False


async def request(rendezvous):
    options = join.StartSpaceJoinRequestOptions(origin="https://app.example", rendezvous=rendezvous)
    return await join.start_space_join_request(options)


async def pair(rendezvous):
    asked = await request(rendezvous)
    await asked.publish()
    look = join.FetchSpaceJoinRequestOptions(asked.code, rendezvous)
    found = await join.fetch_space_join_request_by_code(look)
    assert found.request["devEdPub"] == asked.device["edPub"]
    assert await join.fetch_space_join_grant(asked) is None, "nobody has approved"

    other = await request(rendezvous)
    other.code = asked.code
    assert await is_refused(other.publish()), "the code is taken"

    owner = generate_device_keys()
    key = f"notebooks/{user_id(owner['edPub'])}/list"
    mine = {"edPubHex": owner["edPub"], "kemPubHex": owner["kemPub"]}
    device = mint_device_cap(owner["edPriv"], owner["edPub"], mine, device_scopes.root_all())
    await make_space_client(device, owner["edPriv"], rendezvous).push(f"/push/{key}", {"milk": 1}, None)

    theirs = {"edPubHex": found.request["devEdPub"], "kemPubHex": found.request["devKemPub"]}
    theirs["userIdHex"] = user_id(theirs["edPubHex"])
    cap = mint_member_cap(owner["edPriv"], owner["edPub"], theirs, "notebooks", scopes.writer("notebooks"))
    grant = join.PublishSpaceJoinGrantOptions(
        found.request, asked.code, "lists", cap, owner, rendezvous, found.hash
    )
    await join.publish_space_join_grant(grant)
    assert await join.fetch_space_join_request_by_code(look) is None, "it is granted"
    assert await is_refused(join.publish_space_join_grant(grant)), "another has been there"

    granted = await join.await_space_join_grant(asked)
    assert (granted.space_id, granted.cap, granted.sealed_by) == ("lists", cap, owner["edPub"])
    guest = make_space_client(granted.cap, asked.device["edPriv"], rendezvous)
    pulled = await guest.pull(f"/pull/{key}")
    assert pulled.data == {"milk": 1}
    await guest.push(f"/push/{key}", {"milk": 2}, pulled.hash)

    await join.clear_space_join_grant(join.ClearSpaceJoinGrantOptions(asked.code, rendezvous))
    assert await join.fetch_space_join_grant(asked) is None
    waiting = await request(rendezvous)
    await waiting.publish()
    print(json.dumps([waiting.code, waiting.request]))


asyncio.run(pair({"baseUrl": sys.argv[1], "namespace": None}))
"""


async def test_device_joins_by_a_code_that_one_request_has_until_it_expires(
    start: Start, session: aiohttp.ClientSession, starfish_python: Path
) -> None:
    clock = FakeClock(wall_clock_ms())
    base = await start({"collections": COLLECTIONS}, now_ms=clock)
    ran = await asyncio.create_subprocess_exec(
        starfish_python / "bin/python", "-c", PROGRAM, base, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await ran.communicate()
    assert ran.returncode == 0
    code, request = json.loads(printed)
    browser, slot = Browser(base, session), f"_pairing/session/{code}"
    assert (await browser.pull(slot)).json["data"] == request
    assert (await browser.push(slot, {})).status == 409, "nobody else can have the code"
    clock.now_ms += 3_600_001
    assert (await browser.pull(slot)).json["hash"] == ""
    assert (await browser.push(slot, {})).status == 200


async def test_stranger_is_not_told_the_codes_of_waiting_devices(
    start: Start, session: aiohttp.ClientSession, subscribe: Listen
) -> None:
    browser = Browser(await start({"collections": COLLECTIONS}), session)
    own = await subscribe(browser, collections="_pairing", params={"_pairing": {"code": "mine"}})
    for code in ("other", "mine"):
        assert (await browser.push(f"_pairing/session/{code}", {}, None)).status == 200
    assert (await own.events(1))[0]["params"] == {"code": "mine"}, "the device names its code"
    assert (await pages(browser, collections="_pairing", params={"_pairing": {"code": "mine"}})).keys == [
        "_pairing/mine"
    ]
    for path in ("/changes", "/events"):
        for query in ("", "?collections=_pairing"):
            assert (await browser.request("GET", f"{path}{query}")).status == 401
    assert (await browser.request("GET", "/list/_pairing/session")).status == 404
