"""Appends to logs and pulls of them, as a browser sends them."""

import hashlib
from collections.abc import Callable
from typing import Any

import orjson

from pysync.auth import signing
from pysync.auth.identity_keys import IdentityKeys
from support.clients import Browser, Reply
from support.reference import canonical

Unique = Callable[[str], str]


def hash_of(count: int, last: object) -> str:
    """The hash of a log that holds `count` elements, `last` being the data of the last."""
    return hashlib.sha256(canonical({"n": count, "last": last}).encode()).hexdigest()


async def append(
    browser: Browser, key: str, data: object, headers: dict[str, str] | None = None, /, **members: Any
) -> Reply:
    return await browser.request("POST", f"/push/{key}", {"data": data, **members}, headers)


async def tail(
    browser: Browser, key: str, query: str = "full=true", headers: dict[str, str] | None = None
) -> Reply:
    return await browser.request("GET", f"/pull/{key}?{query}", headers=headers)


async def elements(browser: Browser, key: str, query: str = "full=true", field: str = "items") -> Any:
    """The elements of a successful pull."""
    pulled = await tail(browser, key, query)
    assert pulled.status == 200
    return pulled.json["data"][field]


def proof(author: IdentityKeys, key: str, data: object) -> dict[str, str]:
    return signing.sign_author(author, signing.APPEND_AUTHOR, key, orjson.dumps(data))


async def ten(browser: Browser, key: str) -> str:
    """A log of the elements 1 to 10, dated 1000 to 10000; its hash."""
    for n in range(1, 11):
        answer = await append(browser, key, {"n": n}, ts=n * 1000)
        assert answer.status == 200
    return str(answer.json["hash"])
