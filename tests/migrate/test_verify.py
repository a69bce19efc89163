"""`pysync verify`: everything that a store holds is read, and what is damaged is named."""

import asyncio
import hashlib
import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace as replace_members
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from components import S3Server
from contracts.files import chunks_of, read_file
from support import reference_append_log as twin
from support.append_log_nodes import keys_below
from support.bit_rot import damages, rot
from support.cli_runner import Shell
from support.clients import Browser, Start
from support.collections import collection
from support.faulty_store import FaultyStore
from support.http_relay import RequestHead
from support.injected_faults import s3_error
from support.s3_fault_proxy import FaultProxy
from support.s3_stores import another_program, new_prefix, opened
from support.starfish_samples import LOG as STARFISH_LOG
from support.starfish_samples import stored as starfish_document
from support.store_samples import LOG, REVOCATIONS, document, fill, flipped, log_objects, put_all, replace

from pysync.errors import StoreUnavailable
from pysync.migrate import Damage
from pysync.store import DamagedFile, FileStat, Store, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.store.s3.damaged_files import KEY, MAX_ENTRIES, READ_EVERY_S, DamagedFiles

CHUNKED = {
    key: json.dumps(value).encode()
    for key, value in twin.starfish_chunks(STARFISH_LOG, "chunked/a", 7).items()
}
"""A log as Starfish keeps it."""


async def test_a_sound_store_is_found_sound() -> None:
    store = MemoryStore()
    await fill(store)
    await put_all(store, CHUNKED)
    await store.put("starfish/a", json.dumps(starfish_document({"n": 1})).encode())
    await store.put("_pysync/projections/p", b'{"after":"1"}')
    await store.put("_pysync/merges/m", b'{"key":"a/b","sha256":"","merged":{}}')
    assert await damages(store) == []


async def test_every_flipped_byte_of_a_document_a_head_and_its_parts_is_found() -> None:
    objects = {"notes/a": document(b'{"text":"one","n":[1,2.5]}'), **log_objects(30)}
    for key, body in objects.items():
        for at in range(len(body)):
            store = MemoryStore()
            await put_all(store, objects)
            changed = body[:at] + bytes([body[at] ^ 1 << at % 8]) + body[at + 1 :]
            await store.put(key, changed)
            assert [damage.key for damage in await damages(store)] == [key], at


async def test_damage_of_a_log_is_reported_with_the_log() -> None:
    store = MemoryStore()
    await fill(store)
    parts = await keys_below(store, "_pysync/logs")
    segment, lost, *_ = [key for key in parts if "/index" not in key]
    block = next(key for key in parts if "/index1-" in key)
    await replace(store, segment, flipped)
    await replace(store, block, flipped)
    await store.delete(lost)
    found = {damage.key: damage for damage in await damages(store)}
    assert {damage.kind for damage in found.values()} == {"log"}
    assert found[block].why == f"it does not match the head of its log; it is a part of the log at {LOG}"
    if lost in found:
        assert found[lost].why == f"it is missing; it is a part of the log at {LOG}"
    assert {segment, lost, block} >= found.keys() >= {block}


async def test_a_revocation_list_that_its_issuer_did_not_sign_is_named() -> None:
    store = MemoryStore()
    await fill(store)
    await replace(store, REVOCATIONS, lambda text: text.replace(b'"generation":3', b'"generation":4'))
    assert await damages(store) == [Damage(REVOCATIONS, "document", "bad-signature")]


async def test_a_chunk_of_starfishs_that_is_damaged_is_named() -> None:
    store = MemoryStore()
    await put_all(store, CHUNKED)
    chunk = next(key for key in CHUNKED if "__seg/" in key)
    await store.put(chunk, CHUNKED[chunk][:-2])
    assert chunk in {damage.key for damage in await damages(store)}


async def test_object_replaced_during_its_verification_is_not_reported() -> None:
    class Hasty(MemoryStore):
        """A store in which what was got is written anew at once."""

        async def get(self, key: str, if_none_match: str | None = None) -> Any:
            found = await super().get(key, if_none_match)
            if isinstance(found, StoredObject):
                await self.put(key, document(b"{}"))
            return found

    store = Hasty()
    await store.put("a", b"not yet a document")
    assert await damages(store) == []


async def test_unreadable_object_is_reported_and_an_unreachable_store_ends_the_run() -> None:
    store = MemoryStore()
    await fill(store)
    failing = FaultyStore(store)
    failing.fail("get", times=10_000, after=3)
    with pytest.raises(StoreUnavailable, match=r"reading .+: it does not answer"):
        await damages(failing)


async def test_the_command_lists_files_that_no_row_names(shell: Shell, tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await fill(store)
    await store.close()
    (tmp_path / "data/files/left").write_bytes(b"left")
    status, output, errors = await shell.run_async("verify", "--store", "file:data")
    assert (status, errors) == (0, "")
    leftover, counts = map(json.loads, output.splitlines())
    assert (leftover["key"], leftover["kind"]) == ("left", "leftover")
    assert counts["damaged"] == 0
    assert (tmp_path / "data/files/left").exists()


async def test_the_command_lists_damaged_objects_and_exits_1(shell: Shell, tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await fill(store)
    await store.close()
    status, output, errors = await shell.run_async("verify", "--store", "file:data")
    assert (status, errors) == (0, "")
    *listed, counts = map(json.loads, output.splitlines())
    assert listed == []
    assert counts["damaged"] == 0
    assert counts["objects"] > 8
    assert counts["bytes"] > 1_000_000
    store = await LocalStore.open_folder(tmp_path / "data")
    await replace(store, "top", flipped)
    await store.close()
    (tmp_path / "data/files/files/b/c").unlink()
    rot(tmp_path / "data/files/files/a.parquet", 500)
    (tmp_path / "pysync.json").write_text('{"version": 1, "store": "file:data"}')
    for location in (("--store", "file:data"), ("--config", "pysync.json")):
        status, output, _ = await shell.run_async("verify", *location)
        assert status == 1
        *listed, counts = map(json.loads, output.splitlines())
        assert {(each["key"], each["kind"]) for each in listed} == {
            ("top", "document"),
            ("files/b/c", "file"),
            ("files/a.parquet", "file"),
        }
        assert all(each["why"] for each in listed)
        assert all(each.keys() == {"key", "kind", "why"} for each in listed)
        assert counts["damaged"] == 3


@pytest.mark.slow
async def adopted(shell: Shell, status: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcomes of `verify --adopt` by key, and the counts."""
    found, output, errors = await shell.run_async("verify", "--store", "file:data", "--adopt")
    assert (found, errors) == (status, "")
    *lines, counts = map(json.loads, output.splitlines())
    return {line["key"]: line for line in lines if "adopted" in line}, counts


async def test_the_command_adopts_replaced_files(shell: Shell, tmp_path: Path) -> None:
    root = tmp_path / "data/files/f"
    store = await LocalStore.open_folder(tmp_path / "data")
    for key in ("f/edited", "f/rotten", "f/large", "f/lost", "f/sound"):
        size = 3_000_000 if key == "f/large" else 10
        await store.write(key, chunks_of(bytes(size)), "text/x-test")
    await store.put("f/document", document(b"{}"))
    before = {key: await store.stat(f"f/{key}") for key in ("edited", "rotten", "large", "sound")}
    (root / "edited").write_bytes(b"new bytes")
    rot(root / "rotten")
    rot(root / "large")
    (root / "lost").unlink()
    outcomes, counts = await adopted(shell, status=1)
    assert {key: each["adopted"] for key, each in outcomes.items()} == {
        "f/edited": True,
        "f/rotten": True,
        "f/large": True,
        "f/lost": False,
    }
    assert (counts["damaged"], counts["adopted"]) == (4, 3)
    assert [damage.key for damage in await damages(store)] == ["f/lost"]
    for key in ("edited", "rotten", "large"):
        file, content = await read_file(store, f"f/{key}")
        assert content == (root / key).read_bytes()
        assert file.sha256 == outcomes[f"f/{key}"]["sha256"] == hashlib.sha256(content).hexdigest()
        known = before[key]
        assert known is not None
        assert file.etag != known.etag
        assert file.content_type == "text/x-test"
    assert await store.stat("f/sound") == before["sound"]
    sizes = {listed.key: listed.size async for listed in store.walk("f")}
    assert sizes["f/edited"] == 9
    await store.delete("f/lost")
    outcomes, counts = await adopted(shell)
    assert (outcomes, counts["damaged"], counts["adopted"]) == ({}, 0, 0)
    await store.close()


async def test_the_command_adopts_files_that_somebody_copied_into_the_folder(
    shell: Shell, tmp_path: Path
) -> None:
    root = tmp_path / "data/files"
    store = await LocalStore.open_folder(tmp_path / "data")
    await store.put("f/document", document(b"{}"))
    (root / "f/g").mkdir(parents=True)
    (root / "f/g/a.png").write_bytes(b"a picture")
    (root / "f/b").write_bytes(bytes(2_000_000))
    (root / "f/document").write_bytes(b"in its place")
    (root / "f/link").symlink_to(root / "f/b")
    outcomes, counts = await adopted(shell)
    assert {key: each["adopted"] for key, each in outcomes.items()} == {
        "f/g/a.png": True,
        "f/b": True,
        "f/document": False,
    }
    assert (counts["damaged"], counts["adopted"]) == (0, 2)
    file, content = await read_file(store, "f/g/a.png")
    assert (content, file.content_type) == (b"a picture", "image/png")
    file, content = await read_file(store, "f/b")
    assert (len(content), file.content_type) == (2_000_000, "application/octet-stream")
    assert isinstance(await store.get("f/document"), StoredObject)
    assert await damages(store) == []
    await store.close()


async def test_adopting_is_for_a_folder_and_not_for_repairs(shell: Shell) -> None:
    status, _, errors = await shell.run_async("verify", "--store", "s3://bucket", "--adopt")
    assert (status, "--adopt is for a store in a folder" in errors) == (1, True)
    status, _, errors = await shell.run_async("verify", "--adopt", "--repair-from", "file:backup")
    assert (status, "--repair-from" in errors) == (2, True)


@pytest.mark.parametrize("part", ["object", "sqlite_autoindex_object_1"])
async def test_the_command_finds_a_damaged_database(shell: Shell, tmp_path: Path, part: str) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    for n in range(500):
        await store.put(f"a/{n}", document(b"{}"))
    await store.close()
    path = tmp_path / "data/pysync.db"
    with closing(sqlite3.connect(path)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        ((page,),) = database.execute(query, (part,)).fetchall()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(path, "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"X" * 100)
    status, output, _ = await shell.run_async("verify", "--store", "file:data")
    assert status == 1
    first, *_ = map(json.loads, output.splitlines())
    assert (first["key"], first["kind"]) == ("pysync.db", "database")
    assert "is damaged" in first["why"]
    assert json.loads(output.splitlines()[-1])["damaged"] >= 1


async def test_the_command_makes_no_store_and_reads_none_of_another_process(
    shell: Shell, tmp_path: Path
) -> None:
    status, output, errors = await shell.run_async("verify", "--store", "file:nothing")
    assert (status, output) == (1, "")
    assert errors == "pysync: file:nothing: there is no store\n"
    assert (await shell.run_async("verify", "--store", "memory:"))[0] == 1
    assert [*tmp_path.iterdir()] == []


class TestBuckets:
    @pytest.fixture(params=["radosgw", "moto"])
    def server(self, request: pytest.FixtureRequest) -> S3Server:
        found: S3Server = request.getfixturevalue(request.param)
        return found

    @pytest.mark.slow
    async def test_damage_in_a_bucket_is_reported(self, server: S3Server) -> None:
        prefix = new_prefix()
        async with opened(server, prefix) as store, another_program(server) as client:
            await fill(store, 100)
            assert await damages(store) == []
            at = {"Bucket": server.bucket, "Key": f"{prefix}/files/b/c"}
            found = await client.head_object(**at)
            kept = {name: found[name] for name in ("Metadata", "ContentType")}
            await client.put_object(**at, Body=b"C", **kept)
            await replace(store, "top", flipped)
            listed = {damage.key: damage for damage in await damages(store)}
            assert listed.keys() == {"top", "files/b/c"}
            assert "its sha256 is" in listed["files/b/c"].why
            for read in (store.open, store.stat):
                with pytest.raises(DamagedFile):
                    await read("files/b/c")
            async with opened(server, prefix) as other:
                with pytest.raises(DamagedFile):
                    await other.open("files/b/c")
            assert {*await damages(store)} == {*listed.values()}
            await store.write("files/b/c", chunks_of(b"C"), "text/plain")
            assert (await read_file(store, "files/b/c"))[1] == b"C", "it is what was pushed now"
            assert {damage.key for damage in await damages(store)} == {"top"}

    async def test_no_read_serves_a_file_of_a_bucket_that_is_known_to_be_damaged(
        self, server: S3Server, start: Start, session: aiohttp.ClientSession
    ) -> None:
        prefix, key = new_prefix(), "photos/a"
        members = {"collections": [collection("photos", allowedMimeTypes=["image/png"])]}
        async with opened(server, prefix) as store, another_program(server) as client:
            sha256 = await store.write(key, chunks_of(bytes(100_000)), "image/png")
            at = {"Bucket": server.bucket, "Key": f"{prefix}/{key}"}
            found = await client.head_object(**at)
            kept = {name: found[name] for name in ("Metadata", "ContentType")}
            await client.put_object(**at, Body=bytes(99_999), **kept)
            assert len(await damages(store)) == 1
            browser = Browser(await start(members, store), session)
            for headers in ({}, {"Range": "bytes=3-5"}, {"If-None-Match": f'"{sha256}"'}):
                assert (await browser.pull(key, headers)).error == (500, "document_corrupt")
            assert (await browser.request("HEAD", f"/pull/{key}")).status == 500

    async def test_a_file_in_a_bucket_that_is_right_again_is_served_again(self, server: S3Server) -> None:
        prefix = new_prefix()
        async with opened(server, prefix) as store, another_program(server) as client:
            await store.write("a", chunks_of(b"a"), "text/plain")
            at = {"Bucket": server.bucket, "Key": f"{prefix}/a"}
            found = await client.head_object(**at)
            kept = {name: found[name] for name in ("Metadata", "ContentType")}
            await client.put_object(**at, Body=b"b", **kept)
            assert len(await damages(store)) == 1
            await client.put_object(**at, Body=b"a", **kept)
            assert await damages(store) == []
            assert (await read_file(store, "a"))[1] == b"a"

    async def test_the_command_verifies_a_bucket(
        self, server: S3Server, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefix = f"verify/{os.urandom(6).hex()}"
        async with opened(server, prefix) as store:
            await _put_some(store)
        url = url_for_command(server, prefix, monkeypatch)
        status, output, errors = await shell.run_async("verify", "--store", url)
        *listed, counts = map(json.loads, output.splitlines())
        assert (status, errors) == (1, "")
        assert [each["key"] for each in listed] == ["top"]
        assert counts["objects"] == 2

    async def test_a_bucket_whose_keys_cannot_be_listed_is_status_5(
        self, moto: S3Server, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefix = f"verify/{new_prefix()}"
        async with FaultProxy(moto.endpoint) as proxy:
            proxy.respond("LIST", status=403, body=s3_error("AccessDenied"), when=_is_walk, times=None)
            url = url_for_command(moto, prefix, monkeypatch, proxy.url)
            status, output, errors = await shell.run_async("verify", "--store", url)
        assert status == 5
        assert errors.startswith("pysync: listing the objects: ")
        assert json.loads(output) == {"objects": 0, "damaged": 0, "bytes": 0}


def _is_walk(sent: RequestHead) -> bool:
    """A listing of keys; the start lists one."""
    return sent.query.get("max-keys") != "1"


def url_for_command(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None
) -> str:
    """The URL of a bucket, whose credentials the environment has."""
    config = server.store(prefix, endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", config.access_key_id or "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", config.secret_access_key or "")
    return f"{config.url}?endpoint={config.endpoint}&region={config.region}&path_style=true"


async def _put_some(store: Store) -> None:
    await store.put("top", flipped(document(b'{"text":"one"}')))
    await store.write("files/a", chunks_of(b"a"), "text/plain")


class TestDamagedFiles:
    """The damaged files of a bucket, as a process learns of them from others."""

    STAT = FileStat(1, "5" * 64, "text/plain", 0, etag="e1")

    async def test_another_process_knows_within_a_minute(self) -> None:
        objects, now_s = MemoryStore(), 0.0
        one, other = DamagedFiles(objects), DamagedFiles(objects, lambda: now_s)
        await other.load()
        await one.record("a", self.STAT, is_damaged=True)
        assert await one.contains("a", self.STAT)
        assert not await other.contains("a", self.STAT)
        now_s = READ_EVERY_S
        assert await other.contains("a", self.STAT)
        await other.record("a", self.STAT, is_damaged=False)
        assert not await other.contains("a", self.STAT)

    async def test_concurrent_damage_notes_of_processes_are_all_kept(self) -> None:
        objects = MemoryStore()
        processes = [DamagedFiles(objects) for _ in range(5)]
        notes = (one.record(f"{n}", self.STAT, is_damaged=True) for n, one in enumerate(processes))
        await asyncio.gather(*notes)
        fresh = DamagedFiles(objects)
        assert [await fresh.contains(f"{n}", self.STAT) for n in range(5)] == [True] * 5

    async def test_another_version_of_the_file_is_not_held_for_damaged(self) -> None:
        files = DamagedFiles(MemoryStore())
        await files.record("a", self.STAT, is_damaged=True)
        assert not await files.contains("a", replace_members(self.STAT, etag="e2"))
        assert not await files.contains("a", replace_members(self.STAT, sha256="6" * 64))
        assert not await files.contains("b", self.STAT)

    async def test_so_many_are_listed_and_a_list_that_cannot_be_read_is_empty(self) -> None:
        objects = FaultyStore(MemoryStore())
        files = DamagedFiles(objects)
        await objects.put(KEY, orjson.dumps({"files": {f"{n}": ["e", "s"] for n in range(MAX_ENTRIES)}}))
        await files.record("a", self.STAT, is_damaged=True)
        found = await objects.get(KEY)
        assert isinstance(found, StoredObject)
        assert len(orjson.loads(found.body)["files"]) == MAX_ENTRIES
        assert await files.contains("a", self.STAT)
        await objects.put(KEY, b"not JSON")
        objects.fail("get")
        assert not await DamagedFiles(objects).contains("a", self.STAT), "the store does not answer"
        assert not await DamagedFiles(objects).contains("a", self.STAT)
