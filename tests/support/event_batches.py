"""Batches of events and the service that takes them."""

from typing import Any

from support.clients import Browser
from support.collections import PUBLIC

EVENTS: dict[str, Any] = {
    "name": "events",
    "storagePath": "events/{app}/{batchId}",
    "listable": True,
    **PUBLIC,
}
SECTION = {"collection": "events", "storagePath": "lake/{app}/{batchId}"}
SERVICE: dict[str, Any] = {"collections": [EVENTS], "events": [SECTION]}


async def pushed(browser: Browser, *events: Any, app: str = "web", **headers: str) -> Any:
    """The answer to a push of events that is to be taken."""
    answer = await browser.push(f"events/{app}/new", {"events": events}, headers=headers)
    assert answer.status == 200, answer.body
    return answer.json


async def listed(browser: Browser, app: str = "web", after: str = "", limit: int = 1000) -> list[str]:
    answer = await browser.request("GET", f"/list/events/{app}?limit={limit}{after and '&after='}{after}")
    items: list[str] = answer.json["items"]
    return items
