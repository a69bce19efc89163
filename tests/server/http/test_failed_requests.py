"""Failed requests of an address, which say nothing about its other clients."""

import aiohttp
import pytest
from support.clients import SUBJECT, Browser, Signed, Start, root_device
from support.collections import MINE

KEY = f"u/{SUBJECT.user_id}/a"


@pytest.mark.parametrize("target", [f"/pull/{KEY}", "/nowhere"])
async def test_new_device_is_served_despite_a_logged_out_client_of_its_address(
    start: Start, session: aiohttp.ClientSession, target: str
) -> None:
    base = await start({"collections": [MINE]})
    logged_out = Browser(base, session)
    for _ in range(300):
        assert (await logged_out.request("GET", target)).status in (401, 404)
    assert (await Signed(base, session, SUBJECT, root_device(SUBJECT)).pull(KEY)).status == 200
