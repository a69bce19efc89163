"""Stores filled with one of each kind of object, and copies of them."""

import asyncio
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

from contracts.files import chunks_of, read_file

from pysync._core import LogHead, decode_push
from pysync.auth import issuing
from pysync.engine.append_log.read import object_key
from pysync.migrate import Copier, CopyReport
from pysync.store import (
    ReadableStore,
    Store,
    StoredObject,
)
from support.append_log_nodes import element, keys_below, numbered
from support.clients import ISSUER

LOG = "logs/a"
UNREAD = "it is not a document, or not the one that was stored"
ELEMENTS = 3000
Reports = list[tuple[str, str]]


def document(text: bytes) -> bytes:
    """A stored document with this data."""
    return decode_push(b'{"data":%b}' % text).stored(1_700_000_000_000)


DOCUMENTS = {
    "notes/a": document(b'{"text":"one"}'),
    "notes/a/_keyring": document(b"{}"),
    "notes/large": document(b'{"text":"%b"}' % (b"x" * 300_000)),
    "notes/\xe4 \U0001f600": document('{"größe":[1.5,1e21,true,null]}'.encode()),
    "top": document(b'{"beyond":9007199254740993}'),
}
FILES = {
    "files/empty": b"",
    "files/a.parquet": bytes(range(256)) * 4000,
    "files/b/c": b"c",
}
REVOCATIONS = f"_pysync/revocations/{ISSUER.user_id}"


async def copy(source: ReadableStore, target: Store, **options: Any) -> tuple[CopyReport, Reports]:
    """What a copier counted and told."""
    reports: Reports = []
    copier = Copier(source, target, lambda key, text: reports.append((key, text)), **options)
    await copier.run()
    return copier.report, reports


@cache
def log_objects(count: int) -> dict[str, bytes]:
    """A log of so many elements: segments of ten, blocks of their index, and the head with the newest ten."""
    head = LogHead("5e" * 16)
    stored: dict[str, bytes] = {}
    for start in range(0, count, 10):
        head, objects = head.seal(64 * 1024)
        stored.update({object_key(head.id, name): body for name, body in objects})
        ten = [(element(data), "") for data in numbered(10, start)]
        head, _ = head.append(ten, 1_700_000_000_000 + start, None)
    return {**stored, LOG: head.stored()}


async def put_all(store: Store, objects: dict[str, bytes]) -> None:
    await asyncio.gather(*(store.put(key, body) for key, body in objects.items()))


async def fill(store: Store, elements: int = ELEMENTS) -> None:
    """Put some of everything that a store may hold, with a log of so many elements."""
    await put_all(store, {**DOCUMENTS, **log_objects(elements)})
    for key, content in FILES.items():
        await store.write(key, chunks_of(content), "application/x-test")
    await store.put(REVOCATIONS, issuing.issue_revocation_list(ISSUER, 3).text)


async def contents(store: Store) -> dict[str, tuple[str, bytes]]:
    """Everything in the store: media types and bytes."""
    held = {}
    for key in await keys_below(store, ""):
        found = await store.get(key)
        if isinstance(found, StoredObject):
            held[key] = found.content_type, found.body
        else:
            file, content = await read_file(store, key)
            assert file.sha256 == hashlib.sha256(content).hexdigest()
            held[key] = file.content_type, content
    return held


async def replace(store: Store, key: str, edit: Callable[[bytes], bytes]) -> None:
    found = await store.get(key)
    assert isinstance(found, StoredObject)
    await store.put(key, edit(found.body))


def flipped(body: bytes) -> bytes:
    """The bytes with one bit changed."""
    return body[:-9] + bytes([body[-9] ^ 1]) + body[-8:]
