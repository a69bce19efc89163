"""Rate limits: which requests a collection's `rateLimit` meters, on every path that reads or writes it."""

import json
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import collection, limit_of

ONE = limit_of(1)
NOTES = collection("notes", listable=True)
LOG = {
    **NOTES,
    "name": "log",
    "storagePath": "log/{id}",
    "appendOnly": {"requireAuthorSignature": False},
    "listable": False,
}

NOTHING: list[str] = []
PUSHES = ["push"]


@pytest.mark.parametrize(
    ("limits", "metered"),
    [
        ({}, NOTHING),
        ({"rateLimit": False}, NOTHING),
        ({"rateLimit": "none"}, NOTHING),
        ({"rateLimit": True}, PUSHES),
        ({"rateLimit": {}}, PUSHES),
        ({"rateLimit": ONE}, PUSHES),
        ({"rateLimit": {"maxRequests": 1}}, PUSHES),
        ({"rateLimit": {"bucket": "ip"}}, PUSHES),
        ({"rateLimit": {"ip": ONE}}, PUSHES),
        ({"rateLimit": {"push": ONE}}, PUSHES),
        ({"rateLimit": {"push": True}}, PUSHES),
        ({"rateLimit": {"pull": ONE}}, ["pull"]),
        ({"rateLimit": {"pull": {"bucket": "ip"}, "bucket": "identity"}}, ["pull"]),
        ({"rateLimit": {"list": {}}}, ["list"]),
        ({"rateLimit": {"push": True, "pull": True, "list": True}}, ["list", "pull", "push"]),
        ({"rateLimit": {**ONE, "push": False, "pull": {}}}, ["pull"]),
        ({"rateLimit": {"push": False}}, NOTHING),
    ],
)
async def test_collection_limits_count_in_addition_to_those_of_the_server(
    start: Start, session: aiohttp.ClientSession, limits: dict[str, Any], metered: list[str]
) -> None:
    browser = Browser(await start({"rateLimit": ONE, "collections": [{**NOTES, **limits}]}), session)
    assert await metered_actions(browser, "notes") == metered


@pytest.mark.parametrize(
    ("limit", "metered"), [(None, NOTHING), (True, PUSHES), (ONE, PUSHES), ({"pull": {}}, ["pull"])]
)
async def test_appends_count_as_pushes(
    start: Start, session: aiohttp.ClientSession, limit: object, metered: list[str]
) -> None:
    browser = Browser(await start({"rateLimit": ONE, "collections": [{**LOG, "rateLimit": limit}]}), session)
    assert await metered_actions(browser, "log") == metered


@pytest.mark.parametrize(("limit", "metered"), [(True, False), ({"pull": {}}, True)])
async def test_batches_bundles_streams_and_pages_of_changes_count_the_pulls_that_are_metered(
    start: Start, session: aiohttp.ClientSession, limit: object, metered: bool
) -> None:
    notes = {**NOTES, "rateLimit": limit}
    page = {**notes, "name": "page", "storagePath": "pages/{id}", "bundle": "b", "listable": False}
    browser = Browser(await start({"rateLimit": ONE, "collections": [notes, page]}), session)
    params = quote(json.dumps({"notes": [{"id": "a"}]}))
    for target in (f"/batch/pull?collections=notes&params={params}", "/pull/pages/p"):
        statuses = [(await browser.request("GET", target)).status for _ in range(2)]
        assert statuses == [200, 429 if metered else 200]
    for method, route in (("HEAD", "events"), ("GET", "changes")):
        answered = await browser.request(method, f"/{route}?collections=notes")
        assert answered.status == (429 if metered else 200)


async def metered_actions(browser: Browser, collection: str) -> list[str]:
    """The actions of which the second request in a window is refused."""
    found = []
    for action, method, target, body in (
        ("list", "GET", f"/list/{collection}", None),
        ("pull", "GET", f"/pull/{collection}/a?last=1", None),
        ("push", "POST", f"/push/{collection}/a", {"data": {}}),
    ):
        statuses = [(await browser.request(method, target, body)).status for _ in range(2)]
        assert 429 not in statuses[:1]
        if statuses[1] == 429:
            found.append(action)
    return found
