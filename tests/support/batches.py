"""Requests for batch pulls."""

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from pysync import _core
from support.clients import Browser, Reply

STORED_MS = 1_700_000_000_000


def collection(name: str, path: str, read: Iterable[str] = ("public",), **members: Any) -> dict[str, Any]:
    return {"name": name, "storagePath": path, "readRoles": [*read], **members}


def stored(data: object, ts_ms: int = STORED_MS, author: str = "") -> bytes:
    body: dict[str, object] = {"data": data}
    if author:
        body |= {"authorPubkey": author, "authorSignature": "s"}
    return _core.decode_push(json.dumps(body).encode()).stored(ts_ms)


async def batch(
    browser: Browser,
    *names: str,
    params: object = None,
    append: object = None,
    known: object = None,
    headers: dict[str, str] | None = None,
    prefix: str = "",
) -> Reply:
    target = f"{prefix}/batch/pull?collections={','.join(map(quote, names))}"
    for name, value in (("params", params), ("appendParams", append), ("known", known)):
        if value is not None:
            target += f"&{name}={quote(json.dumps(value))}"
    return await browser.request("GET", target, headers=headers)


def entries(reply: Reply, name: str) -> list[Any]:
    assert reply.status == 200, reply.body
    found: list[Any] = reply.json["collections"][name]
    return found
