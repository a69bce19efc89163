"""Operators erase with the command line and at their own listener."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest
from components import S3Server
from support.cli_runner import Shell
from support.cli_service import ADMIN_TOKEN
from support.clients import Start
from support.erasure import ANNE, BERT, SECRET, keys_with, members, person, serve, stored_keys, write_all
from support.faulty_store import FaultyStore
from support.folder_search import files_with
from support.s3_stores import new_prefix, opened

from pysync.coordinator.memory import MemoryCoordinator
from pysync.erase import EraseRequest
from pysync.server.app import App
from pysync.server.process.admin import AdminListener
from pysync.server.process.erasure import ERASE_PATH
from pysync.store import Store
from pysync.store.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("hasty_erasures")

TYPED = {"Content-Type": "application/json"}
TOKEN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
JSON = TYPED | TOKEN
ANNES = {"identity": ANNE.user_id}


class Operators(NamedTuple):
    """A service with an operators' listener."""

    app: App
    base: str
    listener: AdminListener

    @property
    def port(self) -> int:
        return self.listener.port

    async def post(
        self, body: object, headers: dict[str, str] = JSON, method: str = "POST"
    ) -> tuple[int, Any]:
        def post_erase() -> tuple[int, Any]:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
            data = body if isinstance(body, bytes) else json.dumps(body)
            connection.request(method, "/admin/erase", data, headers)
            response = connection.getresponse()
            answer = json.loads(response.read() or b"null")
            connection.close()
            return response.status, answer

        return await asyncio.to_thread(post_erase)


@asynccontextmanager
async def operated(
    start: Start,
    objects: Store | None = None,
    coordinator: MemoryCoordinator | None = None,
    **more: Any,
) -> AsyncIterator[Operators]:
    """A service with an operators' listener."""
    configured = members(auth={"adminToken": ADMIN_TOKEN}, **more)
    base = await start(configured, objects, coordinator=coordinator)
    app = start.apps[-1]  # type: ignore[attr-defined]
    listener = AdminListener(app.admin_pages, "127.0.0.1", 0)
    try:
        yield Operators(app, base, listener)
    finally:
        await listener.close()


@pytest.fixture
async def operators(start: Start, filled_folder: Path) -> AsyncIterator[Operators]:
    """A service with an operators' listener, to which Anne and Bert have written."""
    async with operated(start, store=f"file:{filled_folder}") as operators:
        yield operators


async def test_listener_reports_erased_objects(operators: Operators, folder: Path) -> None:
    status, dry = await operators.post({**ANNES, "dryRun": True})
    assert (status, dry["dryRun"]) == (200, True)
    assert files_with(folder, ANNE.user_id)
    status, wet = await operators.post(ANNES)
    assert status == 200
    assert (wet["identity"], wet["dryRun"], wet["bytes"]) == (ANNE.user_id, False, dry["bytes"])
    assert {kind: wet["erased"][kind] for kind in dry["erased"]} == dry["erased"]
    assert {"backups", "bucketVersions", "logsOfOthers", "revocations"} <= wet["notTouched"].keys()
    assert files_with(folder, ANNE.user_id) == set()


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (ANNES, {**JSON, "Origin": "http://127.0.0.1:8081"}, 403, "foreign_origin"),
        (ANNES, {**JSON, "Origin": "null"}, 403, "foreign_origin"),
        (ANNES, TYPED, 401, "unauthorized"),
        (ANNES, {**TYPED, "Authorization": "Bearer wrong"}, 401, "unauthorized"),
        (ANNES, {**TYPED, "Authorization": ADMIN_TOKEN}, 401, "unauthorized"),
        (ANNES, {**JSON, "Host": "rebound.example"}, 421, "misdirected_request"),
        (ANNES, {**TOKEN, "Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        (ANNES, TOKEN, 415, "unsupported_media_type"),
        (b"{", JSON, 400, "invalid_json"),
        (b"[]", JSON, 400, "body_not_object"),
        ({}, JSON, 400, "bad_request"),
        ({**ANNES, "dryRun": 1}, JSON, 400, "bad_request"),
        ({"prefix": "_pysync"}, JSON, 400, "bad_request"),
        ({"identity": "anne"}, JSON, 400, "bad_request"),
    ],
)
async def test_the_listener_rejects_pages_of_browsers_and_invalid_requests(
    operators: Operators, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    before = await stored_keys(operators.app.store)
    rejected, answer = await operators.post(body, headers)
    assert (rejected, answer["code"]) == (status, code)
    assert await stored_keys(operators.app.store) == before


@pytest.mark.parametrize("body", [ANNES, {**ANNES, "dryRun": True}], ids=["erasure", "dry run"])
async def test_of_erasures_at_once_one_runs_and_the_listener_serves_all_else(
    start: Start, body: dict[str, Any]
) -> None:
    store, end = FaultyStore(MemoryStore()), asyncio.Event()
    async with operated(start, store) as operators:

        def get(path: str) -> int:
            connection = HTTPConnection("127.0.0.1", operators.port, timeout=60)
            connection.request("GET", path)
            status = connection.getresponse().status
            connection.close()
            return status

        for _ in range(20):  # background jobs walk the store too
            store.delay("walk", end)
        *others, last = asyncio.as_completed([operators.post(body) for _ in range(7)])
        for other in others:
            status, answer = await other
            assert (status, answer["code"]) == (503, "unavailable")
        for path in ("/health", "/health/ready", "/metrics", "/admin"):
            assert await asyncio.to_thread(get, path) == 200
        end.set()
        assert (await last)[0] == 200
        assert (await operators.post(body))[0] == 200


async def test_only_a_post_erases(operators: Operators) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert (await operators.post(ANNES, JSON, method))[0] == 405


async def test_an_erasure_that_a_shutdown_ends_is_answered_and_continues_with_the_next_service(
    start: Start, session: aiohttp.ClientSession
) -> None:
    kept, coordinator = MemoryStore(), MemoryCoordinator()
    store = FaultyStore(kept)
    async with operated(start, store, coordinator) as operators:
        await write_all(person(ANNE, operators.base, session), SECRET)
        arrived = store.delay("delete", asyncio.Event(), after=5)
        posting = asyncio.ensure_future(operators.post(ANNES))
        await arrived.wait()
        await operators.listener.close()
        status, answer = await posting
        assert (status, answer["code"]) == (503, "unavailable")
    assert await keys_with(kept, ANNE.user_id, SECRET)
    await start(members(), kept, coordinator=coordinator)
    await start.apps[-1].jobs.erasure.wait()  # type: ignore[attr-defined]
    assert await keys_with(kept, ANNE.user_id) == set()


async def test_no_erasure_begins_once_the_server_stops(operators: Operators) -> None:
    operators.app.admin_pages.actions[ERASE_PATH].cancel()
    status, answer = await operators.post(ANNES)
    assert (status, answer["code"]) == (503, "unavailable")
    assert await keys_with(operators.app.store, ANNE.user_id)


async def test_command_erases_while_a_service_runs(
    operators: Operators, shell: Shell, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "pysync.json").write_bytes(
        orjson.dumps({"version": 1, "store": f"file:{folder}", **members()})
    )
    named = ("erase", "--config", str(tmp_path / "pysync.json"), "--identity", ANNE.user_id)
    status, output, errors = await shell.run_async(*named, "--dry-run")
    assert (status, errors) == (0, "")
    dry = json.loads(output)
    status, output, errors = await shell.run_async(*named, "--kem-key", ANNE.kem_pub)
    assert (status, errors) == (0, "")
    wet = json.loads(output)
    assert {kind: wet["erased"][kind] for kind in dry["erased"]} == dry["erased"]
    assert (wet["kemKeys"], "keyrings" in wet["notTouched"]) == ([ANNE.kem_pub], False)
    assert files_with(folder, ANNE.user_id) == set()


def test_command_reports_wrong_arguments(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "pysync.json").write_bytes(orjson.dumps({"version": 1, "store": "memory:", **members()}))
    config = ("--config", str(tmp_path / "pysync.json"))
    for arguments, status, why in (
        (("--key", "a", "--prefix", "b"), 2, "not allowed with argument"),
        ((), 2, "one of the arguments --key --prefix --identity is required"),
        (("--key", "_pysync/a"), 1, "the server's own"),
        (("--key", "a"), 1, "use POST /admin/erase there"),
        (("--identity", "anne"), 1, "'anne' is not an identity"),
    ):
        result, output, errors = shell.run("erase", *config, *arguments)
        assert (result, output) == (status, "")
        assert why in errors


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
async def test_the_command_says_if_it_found_nothing(
    operators: Operators, shell: Shell, folder: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    (tmp_path / "pysync.json").write_bytes(
        orjson.dumps({"version": 1, "store": f"file:{folder}", **members()})
    )
    named = ("erase", "--config", str(tmp_path / "pysync.json"), *more)
    stranger = ANNE.user_id[::-1]
    status, output, errors = await shell.run_async(*named, "--identity", stranger)
    assert (status, json.loads(output)["found"]) == (0, False)
    assert f"nothing that belongs to the identity {stranger} was found" in errors
    status, output, errors = await shell.run_async(*named, "--key", "board/lobby")
    assert (status, json.loads(output)["found"], errors) == (0, True, "")


async def test_nothing_of_an_erased_person_is_in_a_bucket(
    start: Start, session: aiohttp.ClientSession, moto: S3Server
) -> None:
    async with opened(moto, new_prefix()) as bucket:
        app = (await serve(start, session, bucket, quotas={})).app
        before = {key for key in await stored_keys(bucket) if BERT.user_id in key}
        assert app.usage_count is not None
        await app.usage_count.run_if_needed()
        report = await app.eraser.run(EraseRequest("identity", ANNE.user_id))
        assert (report.erased["documents"], report.erased["files"], report.erased["logs"]) == (6, 3, 1)
        await app.eraser.run(EraseRequest("key", "board/lobby"))
        assert await keys_with(bucket, ANNE.user_id, SECRET) == set()
        assert {key for key in await stored_keys(bucket) if BERT.user_id in key} == before
        changes = await app.engine.outbox.log.read("", 1000)
        assert changes is not None
        assert not [change for _, change in changes if ANNE.user_id.encode() in change.text]
