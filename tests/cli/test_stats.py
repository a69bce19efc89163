"""`pysync stats` and `pysync get` look into a store without a server; `pysync usage` asks one."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell
from support.cli_service import SEE_LOG
from support.clients import SUBJECT, Start

from pysync import config
from pysync.auth.certificates import user_id
from pysync.client import Client
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on

PUBLIC: dict[str, Any] = {"readRoles": ["public"], "writeRoles": ["public"]}
UNPROVEN = {"requireAuthorSignature": False, "field": "lines"}
COLLECTIONS = [
    {"name": "notes", "storagePath": "notes/{id}", **PUBLIC},
    {"name": "log", "storagePath": "logs/{id}", "appendOnly": UNPROVEN, **PUBLIC},
    {"name": "photos", "storagePath": "photos/{id}", "allowedMimeTypes": ["image/*"], **PUBLIC},
    {
        "name": "mixed",
        "storagePath": "mixed/{id}",
        "allowedMimeTypes": ["image/*", "application/json"],
        **PUBLIC,
    },
]
SERVICE = {"version": 1, "store": "file:data", "collections": COLLECTIONS}


@pytest.fixture
async def filled(shell: Shell, tmp_path: Path) -> Shell:
    """The folder of a configuration and of a store with some of everything."""
    Path("pysync.json").write_text(json.dumps(SERVICE))
    app = await create_app(config.parse(SERVICE))
    async with app, serve_on(app) as port, Client(f"http://127.0.0.1:{port}") as client:
        await client.push("notes/small", {"text": "x"})
        await client.push("notes/large", {"text": "x" * 5000})
        await client.push("mixed/d", {"n": 1})
        for number in range(100):
            await client.append("logs/l", {"n": number, "text": "x" * 100}, sign_author=False)
        await client.push_blob("photos/p", b"x" * 3000, "image/png")
        await client.push_blob("mixed/p", b"x" * 10, "image/png")
    return shell


async def test_stats_count_by_collection_and_name_the_largest(filled: Shell) -> None:
    status, output, errors = await filled.run_async("stats", "-n", "3")
    assert (status, errors) == (0, "")
    found = json.loads(output)
    used = found["collections"]
    assert used["notes"]["documents"] == 2
    assert used["notes"]["bytes"] > 5000
    assert (used["log"]["documents"], used["log"]["logElements"]) == (0, 100)
    assert used["log"]["bytes"] > 100 * 100
    assert used["photos"] == {"bytes": 3000, "documents": 0, "logElements": 0, "files": 1}
    assert (used["mixed"]["documents"], used["mixed"]["files"]) == (1, 1)
    assert [each["key"] for each in found["largest"]] == ["logs/l", "notes/large", "photos/p"]
    assert found["largest"][2]["bytes"] == 3000
    assert found["total"]["bytes"] == sum(each["bytes"] for each in used.values())


async def test_stats_of_a_store_count_by_the_first_segment(filled: Shell) -> None:
    Path("pysync.json").unlink()
    status, output, errors = await filled.run_async("stats", "--store", "file:data")
    assert (status, errors) == (0, "")
    used = json.loads(output)["prefixes"]
    assert set(used) == {"notes", "mixed", "logs", "photos", "_pysync"}
    assert used["photos"]["files"] == 1


async def test_keys_of_no_collection_count_as_other(filled: Shell) -> None:
    served = {**SERVICE, "collections": COLLECTIONS[:1]}
    Path("pysync.json").write_text(json.dumps(served))
    found = json.loads((await filled.run_async("stats"))[1])["collections"]
    assert set(found) == {"notes", "other", "_pysync"}
    assert found["other"]["files"] == 2


async def test_get_prints_a_document_a_log_and_a_file(filled: Shell) -> None:
    status, output, errors = await filled.run_async("get", "notes/small")
    assert (status, errors) == (0, "")
    assert json.loads(output)["data"] == {"text": "x"}
    assert set(json.loads(output)) == {"data", "hash", "timestamp"}
    status, output, errors = await filled.run_async("get", "logs/l")
    assert (status, errors) == (0, "")
    assert [json.loads(line)["data"]["n"] for line in output.splitlines()] == list(range(100))
    status, output, errors = await filled.run_async("get", "notes/none")
    assert (status, errors) == (6, "pysync: notes/none: nothing is stored\n")


async def test_get_prints_a_file_as_it_is(filled: Shell) -> None:
    status, output, errors = await filled.run_async("get", "--config", "pysync.json", "photos/p")
    assert (status, output, errors) == (0, "x" * 3000, "")


def test_nothing_is_created_where_there_is_no_store(shell: Shell) -> None:
    assert shell.run("stats", "--store", "file:none")[0] == 1
    assert shell.run("get", "--store", "memory:", "a")[0] == 1
    assert not Path("none").exists()


async def test_usage_prints_what_the_caller_uses(shell: Shell, start: Start) -> None:
    own = {"name": "own", "storagePath": "own/{identity}/{id}", "readRoles": ["self"], "writeRoles": ["self"]}
    quotas = {"identity": {"documents": 3}}
    base = await start({"store": "file:data", "collections": [own], "quotas": quotas})
    Path("key.json").write_bytes(SUBJECT.to_json())
    signed = ("--server", base, "--key", "key.json")
    me = user_id(SUBJECT.ed_pub)
    status, _, errors = await shell.run_async("push", f"own/{me}/1", *signed, stdin='{"n": 1}')
    assert (status, errors) == (0, "")
    status, output, errors = await shell.run_async("usage", *signed)
    assert (status, errors) == (0, "")
    report = json.loads(output)
    assert report["identity"] == me
    assert report["used"]["documents"] == 1
    assert report["allowed"] == {"documents": 3}
    status, _, errors = await shell.run_async("usage", "--space", "club", *signed)
    assert (status, errors) == (4, f"pysync: Forbidden{SEE_LOG}\n")
