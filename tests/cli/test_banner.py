"""What `pysync serve` says of itself holds."""

import json
import shlex
from typing import Any

import aiohttp
import pytest
from support.clients import Start
from support.collections import PUBLIC, UNSIGNED
from support.configurations import EXAMPLE, collection, config

from pysync.config import parse
from pysync.server.banner import banner


def lines(*collections: dict[str, Any], **members: Any) -> list[str]:
    return banner(parse(config(*collections, **members)), 8080).splitlines()


def test_the_lines_to_try_are_of_a_collection_that_is_open_and_served_alone() -> None:
    told = lines(
        collection(name="title", storagePath="boards/{id}", bundle="board", **PUBLIC),
        collection(name="log", storagePath="log/{id}", appendOnly=True, **PUBLIC),
        collection(listable=True, **PUBLIC),
        server={"mountPath": "/v1"},
    )
    tried = [line for line in told if "curl" in line]
    assert "http://127.0.0.1:8080/v1/push/notes/hello-" in tried[0]
    assert "http://127.0.0.1:8080/v1/pull/notes/hello-" in tried[1]
    assert tried[2].strip() == "curl -s http://127.0.0.1:8080/v1/list/notes"


def test_the_lines_to_try_append_where_no_author_proof_is_needed() -> None:
    unsigned = {"requireAuthorSignature": False}
    told = lines(
        collection(name="signed", storagePath="signed/{id}", appendOnly=True, **PUBLIC),
        collection(name="gone", storagePath="g/{id}", appendOnly={**unsigned, "persist": False}, **PUBLIC),
        collection(name="log", storagePath="log/{id}", appendOnly=unsigned, **PUBLIC),
    )
    tried = [line.strip() for line in told if "curl" in line]
    assert tried[0].startswith("curl -s http://127.0.0.1:8080/push/log/hello-")
    assert tried[1].startswith("curl -s 'http://127.0.0.1:8080/pull/log/hello-")
    assert tried[1].endswith("?last=10'")
    assert tried[2] == "curl -s http://127.0.0.1:8080/health"


def test_a_line_to_try_sends_a_file_where_any_text_is_taken() -> None:
    told = lines(
        collection(name="img", storagePath="img/{id}", allowedMimeTypes=["image/*"], **PUBLIC),
        {"preset": "parquet", "name": "rows", "storagePath": "rows/{id}", "write": "public"},
        collection(name="any", storagePath="any/{id}", allowedMimeTypes=["text/*"], **PUBLIC),
    )
    tried = [line.strip() for line in told if "curl" in line]
    assert tried[0].startswith("curl -s http://127.0.0.1:8080/push/any/hello-")
    assert tried[0].endswith("-H 'Content-Type: text/plain' --data-binary 'hello'")
    assert tried[1].startswith("curl -s http://127.0.0.1:8080/pull/any/hello-")
    assert tried[2] == "curl -s http://127.0.0.1:8080/health"


async def test_the_lines_to_try_of_the_example_work(start: Start, session: aiohttp.ClientSession) -> None:
    members = json.loads(EXAMPLE.read_text()) | {"store": "memory:"}
    members["server"]["examples"] = str(EXAMPLE.parent / members["server"]["examples"])
    base = await start(members)
    told = banner(parse(members), int(base.rpartition(":")[2])).splitlines()
    tried = [shlex.split(line)[2:] for line in told if line.startswith("  curl -s ")]
    answers = []
    for url, *options in tried:
        given = dict(zip(options[::2], options[1::2], strict=True))
        body = given.get("-d") or given.get("--data-binary")
        headers = dict([given["-H"].split(": ")]) if body else None
        async with session.request("POST" if body else "GET", url, data=body, headers=headers) as answer:
            assert answer.status == 200, url
            answers.append((url.removeprefix(base).split("/")[1:3], await answer.text()))
    assert [place for place, _ in answers] == [
        ["push", "notes"],
        ["pull", "notes"],
        ["list", "notes"],
        ["push", "journal"],
        ["pull", "journal"],
        ["push", "files"],
        ["pull", "files"],
        ["list", "files"],
        ["push", "events"],
        ["list", "events"],
        ["health"],
    ]
    texts = {"/".join(place): text for place, text in answers}
    assert texts["pull/files"] == "hello"
    assert json.loads(texts["list/events"])["items"] == [json.loads(texts["push/events"])["batchId"]]


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


def test_what_code_and_projections_are_at_work_is_told() -> None:
    told = lines(
        collection(),
        collection(name="taps", storagePath="taps/{batchId}"),
        plugins=["teams:Teams", "audit"],
        events=[{"collection": "taps", "storagePath": "lake/{batchId}"}],
        projections=[
            {"source": "notes", "target": "titles/notes", "id": "{id}"},
            {"name": "all", "source": ["notes", "notes"], "target": "titles/all", "id": "{id}"},
        ],
    )
    assert "  plugins      teams:Teams, audit" in told
    assert "  projection   titles/notes, of notes" in told
    assert "  projection   all, of notes, notes" in told
    assert "  events       taps, as Parquet in lake/{batchId}" in told
    none = lines(collection())
    assert not [line for line in none if line.startswith(("  plugins", "  projection", "  events"))]


def test_a_list_at_the_top_has_no_slash_at_its_end() -> None:
    told = lines(collection(storagePath="{id}", listable=True, **PUBLIC))
    assert "  curl -s http://127.0.0.1:8080/list" in told


def test_each_collection_is_told_with_who_may_use_it() -> None:
    told = lines(
        collection(
            name="title", storagePath="boards/{id}", bundle="board", readRoles=["a", "b"], pullOnly=True
        ),
        collection(name="log", storagePath="log/{id}", appendOnly=True),
        collection(name="open", storagePath="open/{id}", appendOnly=UNSIGNED, **PUBLIC),
        collection(name="img", storagePath="img/{id}", allowedMimeTypes=["image/png"]),
    )
    assert "  log    log/{id}     read nobody; append nobody with author proof" in told
    assert "  open   open/{id}    read public; append public" in told
    assert "  title  boards/{id}  read a, b; not pushed; in bundle board" in told
    assert "  img    img/{id}     read nobody; write nobody" in told
