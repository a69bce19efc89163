"""Files and sealed files with the client and the service together."""

import hashlib
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import pytest_asyncio
from support.clients import ISSUER, STRANGER, SUBJECT, Start, root_device
from support.collections import ROOM, collection
from support.s3_fault_proxy import FaultProxy

from pysync.client import Client, sealed
from pysync.client.files import FileTooLarge
from pysync.client.sealed import Keyring, UnlockedKeyring, pull_and_open_blob, seal_and_push_blob
from pysync.errors import Forbidden, PayloadTooLarge, UnsupportedMediaType

PARQUET = "application/vnd.apache.parquet"
SERVICE: dict[str, Any] = {
    "collections": [
        collection("photos", allowedMimeTypes=["image/*", "application/json"], maxBodyBytes=4 << 20, **ROOM),
        collection("any", allowedMimeTypes=["*/*"], **ROOM),
        collection("open", allowedMimeTypes=["image/*"], maxBodyBytes=1000),
        collection("events", "events/{app}/{batchId}", listable=True, **ROOM),
        {"preset": "parquet", "name": "rows", "storagePath": "rows/{id}", "write": ["public"]},
        {
            "preset": "sealedParquet",
            "name": "vault",
            "storagePath": "vault/{id}",
            "maxBodyBytes": 4 << 20,
            "read": ["public"],
            "write": ["public"],
        },
    ],
    "namespaces": {
        "acme": {"collections": [collection("any", "acme/{id}", allowedMimeTypes=["*/*"], **ROOM)]}
    },
    "events": [{"collection": "events", "storagePath": "events/{app}/{batchId}"}],
    "auth": {"trustedIssuers": [ISSUER.ed_pub]},
}
LARGE = os.urandom(3 << 20)


@pytest_asyncio.fixture(params=["memory", "file"])
async def url(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> str:
    store = "memory:" if request.param == "memory" else f"file:{tmp_path}/data"
    return await start({**SERVICE, "store": store})


@pytest_asyncio.fixture
async def owner(url: str) -> AsyncIterator[Client]:
    async with signed(url) as client:
        yield client


def signed(url: str, **options: Any) -> Client:
    certificate = root_device(ISSUER, collections=("rooms",))
    return Client(url, keys=ISSUER, certificate=certificate, **options)


async def no_wait(seconds: float) -> None: ...


@pytest.mark.parametrize("content", [b"", b"x", LARGE], ids=["empty", "small", "large"])
async def test_a_file_comes_back_as_it_was_pushed(owner: Client, content: bytes, tmp_path: Path) -> None:
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "source").write_bytes(content)
    assert (await owner.push_blob("photos/a", content, "image/png")).hash == digest
    assert await owner.pull_blob("photos/a") == (content, "image/png", digest)
    assert (await owner.push_blob("photos/a", tmp_path / "source", "image/gif")).hash == digest
    head = await owner.pull_blob_to("photos/a", tmp_path / "target")
    assert head is not None
    assert (head.content_type, head.hash, head.size) == ("image/gif", digest, len(content))
    assert (tmp_path / "target").read_bytes() == content


async def test_the_last_push_wins_and_a_missing_file_is_none(owner: Client) -> None:
    assert await owner.pull_blob("photos/none") is None
    await owner.push_blob("photos/a", b"1", "image/png")
    await owner.push_blob("photos/a", b"2", "image/png")
    file = await owner.pull_blob("photos/a")
    assert file is not None
    assert file.data == b"2"


async def test_a_file_of_a_namespace_is_there_alone(url: str) -> None:
    async with signed(url) as root, signed(url, namespace="acme") as acme:
        await acme.push_blob("acme/a", b"mine", "text/plain")
        file = await acme.pull_blob("acme/a")
        assert file is not None
        assert (file.data, file.content_type) == (b"mine", "text/plain")
        assert await root.pull_blob("any/a") is None


async def test_json_is_a_file_where_a_collection_has_no_documents(owner: Client) -> None:
    await owner.push_blob("any/a", b'{"data": {}, "hash": ""}', "application/json")
    file = await owner.pull_blob("any/a")
    assert file is not None
    assert (file.data, file.content_type) == (b'{"data": {}, "hash": ""}', "application/json")


async def test_files_and_documents_of_one_collection_are_not_taken_for_each_other(owner: Client) -> None:
    await owner.push("photos/d", {"a": 1})
    with pytest.raises(ValueError, match="a document"):
        await owner.pull_blob("photos/d")


@pytest.mark.slow
async def test_rejection_is_raised_whatever_was_sent_by_then(url: str, owner: Client) -> None:
    with pytest.raises(UnsupportedMediaType):
        await owner.push_blob("photos/a", LARGE, "text/plain")
    with pytest.raises(PayloadTooLarge):
        await owner.push_blob("photos/a", bytes(64 << 20), "image/png")
    certificate = root_device(STRANGER, collections=("rooms",))
    async with Client(url, keys=STRANGER, certificate=certificate) as stranger:
        with pytest.raises(Forbidden):
            await stranger.push_blob("photos/a", LARGE, "image/png")
        with pytest.raises(Forbidden):
            await stranger.pull_blob("photos/a")
    assert await owner.pull_blob("photos/a") is None


async def test_chunks_that_turn_out_to_be_too_many_are_rejected(owner: Client) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65536)

    with pytest.raises(PayloadTooLarge):
        await owner.push_blob("photos/a", endless(), "image/png")
    assert await owner.pull_blob("photos/a") is None


async def test_a_large_file_arrives_over_cuts(url: str, owner: Client, tmp_path: Path) -> None:
    await owner.push_blob("photos/a", LARGE, "image/png")
    async with FaultProxy(url) as proxy, signed(proxy.url, sleep=no_wait) as unlucky:
        for size in (100_000, 200_000):
            proxy.truncate("GET", to_bytes=size)
        await unlucky.pull_blob_to("photos/a", tmp_path / "f")
        assert (tmp_path / "f").read_bytes() == LARGE
        assert proxy.calls["GET"] == 3


async def test_a_push_whose_answer_was_lost_is_made_again(url: str, owner: Client) -> None:
    async with FaultProxy(url) as proxy, signed(proxy.url, sleep=no_wait) as unlucky:
        proxy.lose_reply()
        await unlucky.push_blob("photos/a", LARGE, "image/png")
    file = await owner.pull_blob("photos/a")
    assert file is not None
    assert file.data == LARGE


async def test_a_parquet_file_keeps_its_bytes_and_has_its_type(owner: Client) -> None:
    await owner.push_parquet("rows/a", b"PAR1...PAR1")
    await owner.push_blob("rows/b", b"PAR1", "application/octet-stream")
    assert await owner.pull_parquet("rows/a") == (
        b"PAR1...PAR1", PARQUET, hashlib.sha256(b"PAR1...PAR1").hexdigest()
    )  # fmt: skip
    file = await owner.pull_parquet("rows/b")
    assert file is not None
    assert file.content_type == PARQUET
    await owner.push_blob("photos/a", b"PNG", "image/png")
    with pytest.raises(UnsupportedMediaType):
        await owner.pull_parquet("photos/a")


async def test_batch_of_events_is_pulled_as_parquet_by_the_id_of_its_push(owner: Client) -> None:
    pushed = await owner.push("events/app/x", {"events": [{"event_type": "opened", "n": 1}]})
    assert pushed.batch_id is not None
    assert [name async for name in owner.list("events/app")] == [pushed.batch_id]
    file = await owner.pull_parquet(f"events/app/{pushed.batch_id}")
    assert file is not None
    assert file.hash == pushed.hash
    rows = pyarrow.parquet.read_table(io.BytesIO(file.data)).to_pylist()
    assert [row["event_type"] for row in rows] == ["opened"]


@pytest.fixture
def keyring() -> Keyring:
    return Keyring.new(ISSUER, [SUBJECT.kem_pub], now_s=1)


@pytest.fixture
def opened(keyring: Keyring) -> UnlockedKeyring:
    return keyring.open(ISSUER, [ISSUER.ed_pub])


async def test_a_sealed_file_opens_for_recipients_and_the_server_has_no_byte_of_it(
    owner: Client, keyring: Keyring, opened: UnlockedKeyring
) -> None:
    await seal_and_push_blob(owner, opened, "vault/a", LARGE)
    theirs = keyring.open(SUBJECT, [ISSUER.ed_pub])
    assert await pull_and_open_blob(owner, theirs, "/pull/vault/a") == LARGE
    stored = await owner.pull_parquet("vault/a")
    assert stored is not None
    assert len(stored.data) == len(LARGE) + 32
    assert LARGE[:64] not in stored.data
    assert await pull_and_open_blob(owner, opened, "vault/none") is None


async def test_a_sealed_file_opens_under_its_own_key_alone(owner: Client, opened: UnlockedKeyring) -> None:
    await seal_and_push_blob(owner, opened, "vault/a", b"hello")
    file = await owner.pull_blob("vault/a")
    assert file is not None
    await owner.push_blob("vault/b", file.data, "application/octet-stream")
    with pytest.raises(sealed.DecryptionFailed):
        await pull_and_open_blob(owner, opened, "vault/b")
    assert await pull_and_open_blob(owner, opened, "vault/b", aad="vault/a") == b"hello"
    assert opened.open_bytes(file.data, "vault/a") == b"hello"


async def test_a_sealed_file_with_a_context_of_its_own_opens_with_that(
    owner: Client, opened: UnlockedKeyring
) -> None:
    for context in ("q3", ""):
        await seal_and_push_blob(owner, opened, "vault/a", b"hello", aad=context)
        assert await pull_and_open_blob(owner, opened, "vault/a", aad=context) == b"hello"
        with pytest.raises(sealed.DecryptionFailed):
            await pull_and_open_blob(owner, opened, "vault/a")


async def test_a_file_that_was_never_sealed_is_not_opened(owner: Client, opened: UnlockedKeyring) -> None:
    await owner.push_blob("vault/a", b"short", "application/octet-stream")
    with pytest.raises(sealed.Truncated):
        await pull_and_open_blob(owner, opened, "vault/a")
    await owner.push_blob("vault/a", bytes(64), "application/octet-stream")
    with pytest.raises(sealed.UnknownEpoch):
        await pull_and_open_blob(owner, opened, "vault/a")


async def test_the_most_bytes_of_a_sealed_file_are_those_of_its_plaintext(
    owner: Client, opened: UnlockedKeyring
) -> None:
    with pytest.raises(FileTooLarge):
        await seal_and_push_blob(owner, opened, "vault/a", b"hello", max_bytes=4)
    assert await owner.pull_blob("vault/a") is None
    await seal_and_push_blob(owner, opened, "vault/a", b"hello", max_bytes=5)
    assert await pull_and_open_blob(owner, opened, "vault/a", max_bytes=5) == b"hello"
    with pytest.raises(FileTooLarge):
        await pull_and_open_blob(owner, opened, "vault/a", max_bytes=4)
