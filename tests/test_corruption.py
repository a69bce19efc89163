"""Damage: a stored object is served as it was written, or not at all."""

from typing import Any

import aiohttp
import pytest
from conftest import Browser, Start

from pysync import _core
from pysync.errors import DocumentCorrupt
from pysync.store import Object
from pysync.store.memory import MemoryStore
from pysync.testing import FaultyStore

TS_MS = 1_763_740_000_000
BODY = (
    b'{"data":{"amount":101,"text":"gr\xc3\xb6\xc3\x9fe","big":9007199254740993},'
    b'"authorPubkey":"p\\"q","authorSignature":"s"}'
)
NOTES = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "writeRoles": ["public"]}


def flips(stored: bytes) -> list[bytes]:
    """The bytes with each single bit changed in turn, and with each byte replaced by some others."""
    changes = {1 << bit for bit in range(8)} | {0xFF, 0x29}
    return [
        stored[:at] + bytes([stored[at] ^ change]) + stored[at + 1 :]
        for at in range(len(stored))
        for change in sorted(changes)
    ]


def said(stored: bytes) -> Any:
    """All that is served of a stored document; None where it is found to be damaged."""
    try:
        document = _core.read_document(stored)
    except DocumentCorrupt:
        return None
    return document.answer(5), document.hash, document.ts_ms


@pytest.mark.parametrize("body", [b'{"data":{}}', b'{"data":{"amount":101}}', BODY])
def test_no_byte_of_a_document_changes_unnoticed(body: bytes) -> None:
    stored = _core.decode_push(body).stored(TS_MS)
    assert said(stored) is not None
    for damaged in flips(stored):
        assert said(damaged) is None, damaged


async def test_a_damaged_document_is_never_pulled(start: Start, session: aiohttp.ClientSession) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [NOTES]}, store=store), session)
    pushed = await browser.push("notes/a", {"amount": 101})
    found = await store.get("notes/a")
    assert isinstance(found, Object)
    await store.put("notes/a", found.body.replace(b"101", b"901"))
    for headers in ({}, {"If-None-Match": f'"{pushed.json["hash"]}"'}):
        assert (await browser.pull("notes/a", headers)).error == (500, "document_corrupt")
