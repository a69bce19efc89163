"""The text that `pysync serve` prints once it listens."""

import json
import shlex
from typing import Any

import aiohttp
import pytest
from support.clients import Start
from support.collections import PUBLIC
from support.configurations import EXAMPLE, collection, config

from pysync.config import parse
from pysync.server.process.serve import banner


def lines(*collections: dict[str, Any], **members: Any) -> list[str]:
    return banner(parse(config(*collections, **members)), 8080).splitlines()


def tried(*collections: dict[str, Any], **members: Any) -> str:
    (line,) = [line.strip() for line in lines(*collections, **members) if "curl" in line]
    return line.removeprefix("curl -s http://127.0.0.1:8080")


def test_the_line_to_try_pushes_a_document_where_anybody_may() -> None:
    printed = tried(
        collection(name="log", storagePath="log/{id}", appendOnly=True, **PUBLIC),
        collection(name="files", storagePath="files/{id}", allowedMimeTypes=["text/plain"], **PUBLIC),
        collection(name="closed", storagePath="closed/{id}"),
        collection(name="typed", storagePath="typed/{id}", objectSchema={"minProperties": 2}, **PUBLIC),
        collection(name="taps", storagePath="taps/{batchId}", **PUBLIC),
        collection(name="title", storagePath="boards/{id}", bundle="board", **PUBLIC),
        events=[{"collection": "taps", "storagePath": "lake/{batchId}"}],
        server={"mountPath": "/v1"},
    )
    assert printed.startswith("/v1/push/boards/hello-")
    assert shlex.split(printed)[0].endswith("/title")


def test_the_line_to_try_queries_the_health_if_nobody_may_push() -> None:
    assert tried(collection(readRoles=["public"])) == "/health"


@pytest.mark.parametrize(
    "server",
    [
        {"host": "0.0.0.0"},
        {"trustedProxyHops": 1},
        {"publicHosts": ["sync.example.org"]},
        {"admin": {"host": "127.0.0.1", "port": 8081}},
    ],
)
def test_the_line_to_try_writes_nothing_into_a_service_for_others(server: dict[str, Any]) -> None:
    assert tried(collection(**PUBLIC), server=server).endswith("/health")


def test_the_line_to_try_never_replaces_a_keyring_or_an_access_document() -> None:
    printed = tried(
        collection(name="keyrings", storagePath="teams/{team}/_keyring", **PUBLIC),
        collection(name="access", storagePath="rooms/{room}/_access", **PUBLIC),
    )
    assert printed == "/health"


def test_a_server_without_collections_says_so_and_names_the_command_that_prints_a_configuration() -> None:
    printed = lines()
    assert [line for line in printed if "nothing is served" in line]
    assert "  pysync init > pysync.yaml" in printed
    assert "curl" not in "\n".join(printed)
    namespaces = {"acme": {"collections": [collection(**PUBLIC)]}}
    assert "No collection" not in "\n".join(lines(namespaces=namespaces))


def test_the_line_to_try_of_a_service_for_this_machine_alone_pushes_a_document() -> None:
    local = {"publicHosts": ["localhost", "127.0.0.1"]}
    assert tried(collection(**PUBLIC), server=local).startswith("/push/notes/hello-")


async def test_the_line_to_try_of_the_example_works(start: Start, session: aiohttp.ClientSession) -> None:
    members = json.loads(EXAMPLE.read_text()) | {"store": "memory:"}
    members["server"]["examples"] = str(EXAMPLE.parent / members["server"]["examples"])
    base = await start(members)
    printed = banner(parse(members), int(base.rpartition(":")[2])).splitlines()
    (url, *options) = next(shlex.split(line)[2:] for line in printed if line.startswith("  curl -s "))
    given = dict(zip(options[::2], options[1::2], strict=True))
    headers = dict([given["-H"].split(": ")])
    async with session.post(url, data=given["-d"], headers=headers) as answer:
        assert answer.status == 200
    async with session.get(url.replace("/push/", "/pull/")) as answer:
        assert (await answer.json())["data"] == {"text": "hello"}


@pytest.mark.parametrize(
    ("coordinator", "shown"),
    [
        ("redis://somebody:hush@r.example:6379/2", "redis://r.example:6379/2"),
        ("rediss://:hu@sh@r.example", "rediss://r.example"),
        ("file:/srv/a@b", "file:/srv/a@b"),
    ],
)
def test_the_coordinator_is_shown_without_its_password(coordinator: str, shown: str) -> None:
    assert f"  coordinator  {shown}" in lines(coordinator=coordinator)


def test_banner_lists_loaded_code_and_projections() -> None:
    printed = lines(
        collection(),
        collection(name="taps", storagePath="taps/{batchId}"),
        plugins=["teams:Teams", "audit"],
        events=[{"collection": "taps", "storagePath": "lake/{batchId}"}],
        projections=[
            {"source": "notes", "target": "titles/notes", "id": "{id}"},
            {"name": "all", "source": ["notes", "notes"], "target": "titles/all", "id": "{id}"},
        ],
    )
    assert "  plugins      teams:Teams, audit" in printed
    assert "  projections  titles/notes, all" in printed
    assert "  events       taps" in printed
    none = lines(collection())
    assert not [line for line in none if line.startswith(("  plugins", "  projections", "  events"))]
