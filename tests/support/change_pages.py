"""A client of pages of changes, as `GET {ns}/changes` gives them."""

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from support.clients import Browser, Reply


async def page(browser: Browser, since: str | None = None, path: str = "/changes", **query: Any) -> Reply:
    """One page. Values of `query` that are no text go as JSON."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in query.items()}
    asked = urlencode(texts if since is None else texts | {"since": since})
    return await browser.request("GET", f"{path}?{asked}" if asked else path)


@dataclass
class Pages:
    """What came of all pages up to the end: the entries, the cursor after them, and the pages' sizes."""

    changes: list[dict[str, Any]] = field(default_factory=list)
    cursor: str = ""
    sizes: list[int] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """The name of each changed document: its collection and the values of its parameters."""
        return [key_of(change) for change in self.changes]


def key_of(change: dict[str, Any]) -> str:
    return "/".join([change["collection"], *change["params"].values()])


async def pages(browser: Browser, since: str | None = None, path: str = "/changes", **query: Any) -> Pages:
    """Every page after a cursor, one after the other."""
    found, has_more = Pages(), True
    while has_more:
        reply = await page(browser, since, path, **query)
        assert reply.status == 200, reply.body
        assert "reset" not in reply.json
        found.changes += reply.json["changes"]
        found.sizes.append(len(reply.json["changes"]))
        since = found.cursor = reply.json["cursor"]
        has_more = reply.json.get("hasMore", False)
    return found
