"""A replica that seals by collection sends nothing in plain, whatever the server says of its collections."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.replicas import nap

from pysync.client import Client, Replica, RetryPolicy
from pysync.client.sealed import UnlockedKeyring
from pysync.errors import UnknownCollection

KEY = "vault/me/1"
SECRET = {"secret": "the combination of the safe"}
RING = UnlockedKeyring(1, {1: bytes(32)})
VAULT, NOTES = {"vault": "vault/{identity}/{id}"}, {"notes": "notes/{id}"}
SWAPPED = {"vault": "elsewhere/{id}", "notes": "vault/{identity}/{id}"}


class UntrustedServer:
    """A server without documents, which names the key templates of its choice. `pushed` has what it got."""

    def __init__(self) -> None:
        self.url = ""
        self.templates: dict[str, str] = {}
        self.pushed: list[dict[str, Any]] = []

    async def changes(self, request: web.Request) -> web.Response:
        page = {"changes": [], "cursor": "1", "hasMore": False, "storagePaths": self.templates}
        return web.json_response(page)

    async def push(self, request: web.Request) -> web.Response:
        self.pushed.append((await request.json())["data"])
        return web.json_response({"hash": "1" * 64, "timestamp": 1})


@pytest.fixture
async def server() -> AsyncIterator[UntrustedServer]:
    server, app = UntrustedServer(), web.Application()
    app.router.add_get("/changes", server.changes)
    app.router.add_post("/push/{key:.*}", server.push)
    async with TestServer(app) as listening:
        server.url = str(listening.make_url("/"))
        yield server


@asynccontextmanager
async def replica_of(
    server: UntrustedServer, folder: Path, names: list[str], sealing: dict[str, Any]
) -> AsyncIterator[Replica]:
    """A replica of these collections, which has received what the server has."""
    once = RetryPolicy(attempts=1, initial_s=0.01, max_s=0.01)
    async with (
        Client(server.url, backoff=once) as client,
        Replica(
            folder / "app.db", client, {name: {} for name in names}, sealing=sealing, sleep=nap
        ) as replica,
    ):
        await replica.synced()
        yield replica


async def test_name_that_was_not_asked_for_does_not_take_a_key(
    server: UntrustedServer, tmp_path: Path
) -> None:
    server.templates = VAULT | {"other": "vault/{identity}/1"}
    async with replica_of(server, tmp_path, ["vault"], {"vault": RING}) as replica:
        replica.put(KEY, SECRET)
        await replica.synced()
    assert [RING.open(data) for data in server.pushed] == [SECRET]


async def test_known_key_template_is_not_replaced(server: UntrustedServer, tmp_path: Path) -> None:
    server.templates = VAULT
    async with replica_of(server, tmp_path, ["vault"], {"vault": RING}):
        pass
    server.templates = {"vault": "elsewhere/{id}"} | NOTES
    async with replica_of(server, tmp_path, ["vault", "notes"], {"vault": RING, "notes": None}) as replica:
        replica.put(KEY, SECRET)
        await replica.synced()
    assert [RING.open(data) for data in server.pushed] == [SECRET]


async def test_collection_whose_key_template_is_missing_is_an_error_of_the_status(
    server: UntrustedServer, tmp_path: Path
) -> None:
    server.templates = NOTES
    async with replica_of(server, tmp_path, ["vault", "notes"], {"vault": RING, "notes": None}) as replica:
        replica.put("notes/a", {"n": 1})
        await replica.synced()
        assert isinstance(replica.status.error, UnknownCollection)
    assert server.pushed == [{"n": 1}]


@pytest.mark.parametrize("templates", [SWAPPED, VAULT | {"notes": "vault/{identity}/1"}])
async def test_edit_of_a_collection_that_sealing_does_not_name_is_rejected(
    server: UntrustedServer, tmp_path: Path, templates: dict[str, str]
) -> None:
    server.templates = templates
    async with replica_of(server, tmp_path, ["vault", "notes"], {"vault": RING}) as replica:
        replica.put(KEY, SECRET)
        await replica.synced()
        (rejected,) = replica.status.rejected
        assert (rejected.key, rejected.data, type(rejected.error)) == (KEY, SECRET, UnknownCollection)
    assert server.pushed == []
