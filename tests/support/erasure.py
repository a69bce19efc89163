"""A service that knows two people, one of whom is erased."""

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import aiohttp
import pytest

from pysync import config
from pysync.auth.identity_keys import IdentityKeys
from pysync.changelog import ChangeLog
from pysync.coordinator.memory import MemoryCoordinator
from pysync.erase import Eraser, EraseRequest, eraser
from pysync.server.app import App, create_app
from pysync.server.process.serve import serve_on
from pysync.store import Store
from pysync.store.types import StoredObject
from support.clients import Browser, Signed, Start, root_device
from support.collections import OWN, UNSIGNED, collection, limit_of
from support.configurations import patient

ANNE = IdentityKeys.from_private(b"\x51" * 32, b"\x61" * 32)
BERT = IdentityKeys.from_private(b"\x52" * 32, b"\x62" * 32)
ANNES = EraseRequest("identity", ANNE.user_id)
SECRET = "5ecret-of-anne"
"""A text in everything that Anne writes."""

COLLECTIONS = [
    collection(
        "notes", "users/{identity}/notes/{id}", **OWN, rateLimit=limit_of(1000), history={"versions": 9}
    ),
    collection("diary", "users/{identity}/diary", **OWN, appendOnly={**UNSIGNED, "chunkSize": 4}),
    collection(
        "photos",
        "users/{identity}/photos/{name}",
        **OWN,
        allowedMimeTypes=["image/*"],
        maxBodyBytes=4_000_000,
    ),
    collection("sealed", "users/{identity}/sealed/{id}", **OWN, encryption="delegated"),
    collection("rings", "users/{identity}/sealed/{id}/_keyring", **OWN),
    collection("board", "board/{room}", appendOnly=UNSIGNED),
    collection("shared", "rooms/{room}/_keyring"),
    collection("room", "rooms/{room}", encryption="delegated"),
    collection("titles", "lists/titles", pullOnly=True, readRoles=["public"], writeRoles=[]),
    collection("mine", "users/{identity}/index", pullOnly=True, readRoles=["self"], writeRoles=[]),
]
PROJECTIONS = [
    {"source": "notes", "target": "lists/titles", "id": "{id}", "value": {"title": "/title"}, "wait": True},
    {
        "name": "index",
        "source": "notes",
        "target": "users/{identity}/index",
        "id": "{id}",
        "value": {},
        "wait": True,
    },
]


def members(**more: Any) -> dict[str, Any]:
    """The configuration of the service."""
    return {"collections": COLLECTIONS, "projections": PROJECTIONS, **more}


def person(keys: IdentityKeys, base: str, session: aiohttp.ClientSession) -> Signed:
    """A client of the service with these keys."""
    return Signed(base, session, keys, root_device(keys))


async def write_all(client: Signed, text: str) -> None:
    """Write something to every collection of one's own, each more than once, and to those of all."""
    me = client.keys.user_id
    for n in range(3):
        key = f"users/{me}/notes/{text}-{n}"
        written = await client.push(key, {"title": f"{text} {n}"}, headers={"Idempotency-Key": f"{n}"})
        assert written.status == 200
        again = await client.push(key, {"title": text * 400}, written.json["hash"])
        last = await client.push(key, {"title": f"{text} once more"}, again.json["hash"])
        assert last.status == 200
        for log in (f"users/{me}/diary", "board/lobby"):
            for _ in range(6):
                sent = await client.request("POST", f"/push/{log}", {"data": {"said": f"{text} {n}" * 30}})
                assert sent.status == 200, sent.body
        target = f"/push/users/{me}/photos/{n}"
        headers = client.headers("POST", target, b"") | {"Content-Type": "image/png"}
        photo = await Browser(client.base, client.session).request(
            "POST", target, text.encode() * 500, headers
        )
        assert photo.status == 200, photo.body
    assert (await client.push(f"users/{me}/sealed/a", {"_encrypted": text})).status == 200
    assert (await client.push(f"users/{me}/sealed/a/_keyring", {"text": text})).status == 200


@pytest.fixture
def hasty_erasures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give followers no time."""
    monkeypatch.setattr(eraser, "SETTLE_S", 0)


@pytest.fixture(scope="module")
def written_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a service that has ended, to which Anne and Bert have written. Tests copy it."""
    folder = tmp_path_factory.mktemp("written") / "data"
    parsed = config.parse({"version": 1, **patient(members(store=f"file:{folder}", quotas={}))})

    async def write() -> None:
        async with (
            await create_app(parsed) as app,
            serve_on(app) as port,
            aiohttp.ClientSession() as session,
        ):
            await write_both(f"http://127.0.0.1:{port}", session)

    writing = Thread(target=asyncio.run, args=(write(),))
    writing.start()
    writing.join()
    return folder


@pytest.fixture
def filled_folder(written_folder: Path, folder: Path) -> Path:
    """A folder like `written_folder` for one test."""
    return Path(shutil.copytree(written_folder, folder))


async def write_both(base: str, session: aiohttp.ClientSession) -> None:
    """Have Anne and Bert write to a service."""
    await write_all(person(ANNE, base, session), SECRET)
    await write_all(person(BERT, base, session), "public-of-bert")


class Served(NamedTuple):
    """A service to which two people have written."""

    app: App
    anne: Signed
    bert: Signed

    @property
    def store(self) -> Store:
        return self.app.store

    @property
    def log(self) -> ChangeLog:
        return self.app.engine.outbox.log

    @property
    def eraser(self) -> Eraser:
        return self.app.eraser


async def serve(
    start: Start,
    session: aiohttp.ClientSession,
    kept: Store | None = None,
    coordinator: MemoryCoordinator | None = None,
    **more: Any,
) -> Served:
    """Start a service with these further members, and have Anne and Bert write to it."""
    base = await start(members(**more), kept, coordinator=coordinator)
    await write_both(base, session)
    return served_at(start, base, session)


def served_at(start: Start, base: str, session: aiohttp.ClientSession) -> Served:
    """The service at `base`, the last that was started."""
    app = start.apps[-1]  # type: ignore[attr-defined]
    return Served(app, person(ANNE, base, session), person(BERT, base, session))


async def stored_keys(store: Store) -> set[str]:
    """The keys of everything that is stored."""
    return {listed.key async for listed in store.walk("")}


async def keys_with(store: Store, *texts: str) -> set[str]:
    """The keys of all objects and files whose key or bytes contain one of the texts."""
    found = set[str]()
    for key in await stored_keys(store):
        body = b""
        document = await store.get(key)
        if isinstance(document, StoredObject):
            body = document.body
        elif (file := await store.open(key)) is not None:
            async with aclosing(file.chunks) as chunks:
                body = b"".join([chunk async for chunk in chunks])
        if any(text.encode() in body or text in key for text in texts):
            found.add(key)
    return found
