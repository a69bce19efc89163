"""Copies to, from and between buckets of real S3 servers."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from components import S3Server
from contracts.files import chunks_of
from support import reference_append_log as twin
from support.append_log_nodes import Node, numbered
from support.cli_runner import Shell
from support.faulty_store import FaultyStore
from support.s3_stores import another_program
from support.starfish_samples import LOG as STARFISH_LOG
from support.starfish_samples import stored
from support.store_samples import DOCUMENTS, LOG, contents, copy, document, fill

from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import StoreUnavailable
from pysync.migrate import CopyReport
from pysync.migrate.copier import MAX_CONCURRENT
from pysync.store import Store, open_store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

pytestmark = pytest.mark.timeout(180)

ELEMENTS = 600
"""Of the log that is copied: 60 segments and the first blocks of its index."""


@pytest.fixture(params=["radosgw", "moto"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def prefix() -> str:
    return f"copy/{os.urandom(6).hex()}"


@pytest_asyncio.fixture
async def bucket(server: S3Server, prefix: str) -> AsyncIterator[Store]:
    store = await open_store(server.store(prefix))
    yield store
    await store.close()


@pytest_asyncio.fixture
async def local(tmp_path: Path) -> AsyncIterator[Store]:
    store = await LocalStore.open_folder(tmp_path / "data")
    yield store
    await store.close()


@pytest.mark.slow
async def test_a_folder_moves_to_a_bucket_and_back(bucket: Store, local: Store, tmp_path: Path) -> None:
    await fill(local, ELEMENTS)
    content = os.urandom(1024) * 20 * 1024
    await local.write("files/large", chunks_of(content), "video/mp4")
    before = await contents(local)
    outcomes, reports = await copy(local, bucket)
    assert (outcomes.copied, reports) == (len(before), [])
    second, reports = await copy(local, bucket)
    assert (second, reports) == (CopyReport(already_there=len(before)), [])
    node = Node(bucket, MemoryCoordinator(), FakeClock())
    await node.append({"n": ELEMENTS}, key=LOG)
    await node.logs.close()
    back = await LocalStore.open_folder(tmp_path / "back")
    outcomes, reports = await copy(bucket, back)
    assert reports == []
    reader = Node(back, MemoryCoordinator(), FakeClock())
    assert await reader.datas(key=LOG) == numbered(ELEMENTS + 1)
    after = await contents(back)
    assert {key: after[key] for key in before if key != LOG} == {
        key: held for key, held in before.items() if key != LOG
    }
    await back.close()


@pytest.mark.slow
async def test_files_and_batches_of_events_move_both_ways_with_their_types_and_hashes(
    bucket: Store, local: Store, tmp_path: Path
) -> None:
    files = {
        "avatars/größe.png": (b"\x89PNG", "image/png"),
        "files/text": (b"", "text/plain; charset=utf-8"),
        "files/film": (os.urandom(1024) * 3 * 1024, "video/mp4"),
        **{
            f"events/{app}/17000000000{n:02}-00000{n}-{'0a' * 6}.parquet": (
                b"PAR1" + os.urandom(8) + b"PAR1",
                "application/vnd.apache.parquet",
            )
            for app in ("shop", "blog")
            for n in range(10)
        },
    }
    for key, (content, content_type) in files.items():
        await local.write(key, chunks_of(content), content_type)
    back = await LocalStore.open_folder(tmp_path / "back")
    for source, target in ((local, bucket), (bucket, back)):
        outcomes, reports = await copy(source, target)
        assert (outcomes.copied, reports) == (len(files), [])
        assert await contents(target) == {key: (type_, content) for key, (content, type_) in files.items()}
        for app in ("shop", "blog"):
            batches = await source.list(f"events/{app}", None, 100)
            assert await target.list(f"events/{app}", None, 100) == batches == sorted(batches)
    await back.close()


async def test_differing_object_in_a_bucket_stays_unless_overwriting_is_allowed(
    bucket: Store, local: Store
) -> None:
    await local.put("a", DOCUMENTS["top"])
    await local.put("b", DOCUMENTS["top"])
    await local.write("c", chunks_of(b"c"), "text/plain")
    await bucket.put("a", document(b'{"other":1}'))
    await bucket.write("b", chunks_of(b"b"), "text/plain")
    await bucket.write("c", chunks_of(b"d"), "text/plain")
    outcomes, _ = await copy(local, bucket)
    assert outcomes == CopyReport(different=3)
    outcomes, _ = await copy(local, bucket, overwrite=True)
    assert outcomes.copied == 3
    assert await contents(bucket) == await contents(local)


async def test_a_bucket_of_starfish_is_read(
    server: S3Server, prefix: str, bucket: Store, local: Store
) -> None:
    values = {
        "notes/a": stored({"text": "größe"}),
        **twin.starfish_chunks(STARFISH_LOG, "logs/chunks", 7),
        "logs/one": twin.starfish_document(STARFISH_LOG),
    }
    async with another_program(server) as client:

        async def put(key: str, body: bytes, content_type: str) -> None:
            await client.put_object(
                Bucket=server.bucket, Key=f"{prefix}/{key}", Body=body, ContentType=content_type
            )

        for key, value in values.items():
            await put(key, json.dumps(value).encode(), "application/json")
        await put("__sync__/config.json", b'{"version":1}', "application/json")
        await put("files/a.png", b"\x89PNG", "image/png")
        await put("files/empty", b"", "application/octet-stream")
    outcomes, reports = await copy(bucket, local)
    assert (outcomes.copied, reports) == (len(values) + 2, [])
    held = await contents(local)
    assert held.pop("files/a.png") == ("image/png", b"\x89PNG")
    assert held.pop("files/empty") == ("application/octet-stream", b"")
    assert {key: json.loads(body) for key, (_, body) in held.items()} == values


@pytest.mark.slow
async def test_a_run_that_broke_off_is_finished_by_the_next(bucket: Store, local: Store) -> None:
    await fill(local, ELEMENTS)
    for after in (0, 3, 40):
        failing = FaultyStore(bucket)
        failing.crash(after, done=True)
        with pytest.raises(StoreUnavailable):
            await copy(local, failing)
    outcomes, reports = await copy(local, bucket)
    assert reports == []
    assert outcomes.is_complete
    assert outcomes.already_there > 40 - MAX_CONCURRENT, "all but those that were under way"
    assert await contents(bucket) == await contents(local)


async def test_a_bucket_that_is_read_can_be_closed_after_the_copy_failed(bucket: Store) -> None:
    for n in range(100):
        await bucket.put(f"notes/{n}", document(b"{}"))
    failing = FaultyStore(MemoryStore())
    failing.fail("put")
    with pytest.raises(StoreUnavailable, match="writing notes/"):
        await copy(bucket, failing)


async def test_the_command_takes_credentials_from_the_environment(
    server: S3Server, prefix: str, local: Store, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await local.put("top", DOCUMENTS["top"])
    url = f"s3://{server.bucket}/{prefix}?endpoint={server.endpoint}&region={server.region}&path_style=true"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_access_key)
    status, output, errors = await shell.run_async("copy", "file:data", url)
    assert (status, errors, json.loads(output)["copied"]) == (0, "", 1)
    status, output, errors = await shell.run_async("copy", url, "file:back")
    assert (status, errors, json.loads(output)["copied"]) == (0, "", 1)
    if server.name == "radosgw":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        status, output, errors = await shell.run_async("copy", url, "file:back")
        assert (status, output) == (5, "")
        assert "secret" in errors
