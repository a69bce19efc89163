"""A push of a version that was written long ago does not bring back what was erased."""

import aiohttp
import pytest
from support.clients import Browser, Start
from support.erasure import ANNE, ANNES, BERT, Served, members, served_at

from pysync import errors
from pysync.client import Client
from pysync.clock import wall_clock_ms
from pysync.erase import EraseRequest

pytestmark = pytest.mark.usefixtures("hasty_erasures")

NOTE = f"users/{ANNE.user_id}/notes/a"


@pytest.fixture
async def served(start: Start, session: aiohttp.ClientSession) -> Served:
    return served_at(start, await start(members()), session)


@pytest.mark.parametrize(
    "request_",
    [
        ANNES,
        EraseRequest("key", NOTE),
        EraseRequest("prefix", f"users/{ANNE.user_id}"),
    ],
    ids=["identity", "key", "prefix"],
)
async def test_what_was_erased_is_not_accepted_again(served: Served, request_: EraseRequest) -> None:
    before_ms = wall_clock_ms() - 1000
    assert (await served.anne.push(NOTE, {"a": 1})).status == 200
    await served.eraser.run(request_)
    again = await served.anne.push(f"{NOTE}?written={before_ms}", {"a": 1})
    assert (again.status, again.json) == (410, {"error": "erased", "code": "erased"})
    assert (await served.anne.pull(NOTE)).json["hash"] == ""
    for query in (f"?written={wall_clock_ms() + 60_000}", ""):
        pushed = await served.anne.push(f"{NOTE}{query}", {"a": 2})
        assert pushed.status == 200, pushed.body
        await served.eraser.run(request_)


async def test_what_was_not_erased_is_accepted(served: Served) -> None:
    await served.eraser.run(ANNES)
    for key in (f"users/{BERT.user_id}/notes/a", "rooms/hall/_keyring"):
        pushed = await served.bert.push(f"{key}?written=1", {"a": 1})
        assert pushed.status == 200, pushed.body


async def test_nobody_else_learns_what_was_erased(served: Served) -> None:
    await served.eraser.run(ANNES)
    assert (await served.bert.push(f"{NOTE}?written=1", {"a": 1})).status == 403


@pytest.mark.parametrize("written", ["", "-1", "1.0", "x", "1e3", "%2B1", "1" * 16, "%D9%A1", "0x1"])
async def test_a_time_that_is_none_is_rejected(served: Served, written: str) -> None:
    pushed = await served.anne.push(f"{NOTE}?written={written}", {"a": 1})
    assert (pushed.status, pushed.json["code"]) == (400, "invalid_written")
    assert (await served.anne.pull(NOTE)).json["hash"] == ""


async def test_the_client_raises_erased(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start(members())
    await start.apps[-1].eraser.run(EraseRequest("key", "rooms/hall/_keyring"))  # type: ignore[attr-defined]
    async with Client(base) as client:
        with pytest.raises(errors.Erased):
            await client.push("rooms/hall/_keyring", {"a": 1}, written_ms=1)
        await client.push("rooms/hall/_keyring", {"a": 1}, written_ms=wall_clock_ms() + 60_000)
    assert (await Browser(base, session).pull("rooms/hall/_keyring")).json["data"] == {"a": 1}
