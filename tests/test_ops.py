"""What operators ask of a running service."""

import aiohttp
from conftest import Browser, Start


async def test_a_service_that_is_about_to_stop_is_alive_and_not_ready(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start({"collections": []}), session)
    assert (await browser.request("GET", "/health/ready")).status == 200
    (app,) = start.apps  # type: ignore[attr-defined]
    app.drain()
    refused = await browser.request("GET", "/health/ready")
    assert (refused.status, refused.json["code"]) == (503, "unavailable")
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await browser.request("GET", "/health")).status == 200


async def test_probes_go_by_address_and_nothing_else_does(
    start: Start, session: aiohttp.ClientSession
) -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "pullOnly": True}
    members = {
        "server": {"publicHosts": ["sync.example"]},
        "namespaces": {"healthcare": {"collections": [notes]}},
    }
    browser = Browser(await start(members), session)
    for probe in ("/health", "/health/ready"):
        assert (await browser.request("GET", probe)).status == 200
    for other in ("/metrics", "/version", "/healthcare/pull/notes/a"):
        assert (await browser.request("GET", other)).status == 421, other
