"""Keyrings kept on a server, and what is sealed with them: with the service in this process."""

import base64
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
import pytest
import pytest_asyncio
from support.clients import ISSUER, STRANGER, SUBJECT, Start, minted_at, root_device
from support.fake_server import serving

from pysync.auth import issuing
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client, SyncDocument, sealed
from pysync.client.sealed import RemoteKeyring, crypto
from pysync.errors import BodyTooDeep, Conflict, Forbidden

ROOM = {"readRoles": ["cap:read:rooms"], "writeRoles": ["cap:write:rooms"], "encryption": "delegated"}
SERVICE: dict[str, Any] = {
    "collections": [
        {"name": "rooms", "storagePath": "rooms/{id}", **ROOM},
        {"name": "keyrings", "storagePath": "rooms/{id}/_keyring", **ROOM},
    ],
    "auth": {"trustedIssuers": [ISSUER.ed_pub]},
}
TRUSTED = [ISSUER.ed_pub]


@pytest.fixture
def now_s() -> int:
    return 1_700_000_000


@pytest_asyncio.fixture
async def base(start: Start) -> str:
    return await start(SERVICE)


@pytest_asyncio.fixture
async def owner(base: str) -> AsyncIterator[Client]:
    certificate = root_device(ISSUER, collections=("rooms",))
    async with Client(base, keys=ISSUER, certificate=certificate) as client:
        yield client


@pytest_asyncio.fixture
async def member(base: str) -> AsyncIterator[Client]:
    """Somebody who may write rooms, but not their keyrings."""
    grant = issuing.Grant(("read", "write"), (*issuing.writer_grant("rooms").paths, "!rooms/*/_keyring"))
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=grant, **minted_at()
    )
    async with Client(base, keys=SUBJECT, certificate=certificate) as client:
        yield client


def ring(client: Client, keys: IdentityKeys = ISSUER, **options: Any) -> RemoteKeyring:
    async def sleep(seconds: float) -> None: ...

    return RemoteKeyring(client, "rooms/r1", keys, TRUSTED, sleep=sleep, **options)


async def test_keyring_is_created_once_and_changed_by_trusted_members(owner: Client, now_s: int) -> None:
    keyring = ring(owner, now_s=lambda: now_s)
    made = await keyring.create([SUBJECT.kem_pub])
    assert (await keyring.read()).data["epochs"]["1"]["createdAt"] == now_s
    with pytest.raises(Conflict):
        await keyring.create()
    added = await keyring.add(STRANGER.kem_pub)
    assert made.content_keys == added.content_keys
    rotated = await keyring.remove(SUBJECT.kem_pub)
    assert (rotated.epoch, keyring.min_epoch) == (2, 2)
    assert (await keyring.read()).recipients == (ISSUER.kem_pub, STRANGER.kem_pub)
    assert (await ring(owner, STRANGER).open()).content_keys == rotated.content_keys
    with pytest.raises(sealed.NotARecipient):
        await ring(owner, SUBJECT).open()


async def test_two_concurrent_changes_of_a_keyring_both_succeed(owner: Client) -> None:
    others = [IdentityKeys.from_private(bytes([20 + n]) * 32, bytes([40 + n]) * 32) for n in range(2)]
    await ring(owner).create([SUBJECT.kem_pub])
    overtaken = Overtaken(owner, lambda: ring(owner).add(others[1].kem_pub))
    added = await ring(overtaken).add(others[0].kem_pub)
    assert (await ring(owner).read()).recipients == tuple(
        keys.kem_pub for keys in (ISSUER, SUBJECT, others[1], others[0])
    )
    assert added.epoch == 1
    overtaken = Overtaken(owner, lambda: ring(owner).remove(SUBJECT.kem_pub))
    assert (await ring(overtaken).remove(others[0].kem_pub)).epoch == 3
    assert (await ring(owner).read()).recipients == (ISSUER.kem_pub, others[1].kem_pub)
    overtaken = Overtaken(owner, lambda: ring(owner).add(SUBJECT.kem_pub))
    with pytest.raises(sealed.AlreadyPresent):
        await ring(overtaken).add(SUBJECT.kem_pub)


class Overtaken(Client):
    """A client before whose first push another does something."""

    def __init__(self, client: Client, meanwhile: Any) -> None:
        self.__dict__.update(client.__dict__)
        self._meanwhile = [meanwhile]

    async def push(self, *arguments: Any, **options: Any) -> Any:
        while self._meanwhile:
            await self._meanwhile.pop()()
        return await super().push(*arguments, **options)


async def test_nobody_locks_themselves_out(owner: Client) -> None:
    keyring = ring(owner)
    await keyring.create([SUBJECT.kem_pub, STRANGER.kem_pub])
    before = await keyring.read()
    with pytest.raises(sealed.NotARecipient):
        await keyring.remove(ISSUER.kem_pub)
    with pytest.raises(sealed.UntrustedAdder):
        await ring(owner, SUBJECT).remove(STRANGER.kem_pub)
    assert (await keyring.read()).data == before.data


async def test_creator_who_does_not_trust_themselves_creates_no_keyring(owner: Client) -> None:
    keyring = RemoteKeyring(owner, "/pull/rooms/r1", ISSUER, [STRANGER.ed_pub])
    assert keyring.key == "rooms/r1/_keyring"
    with pytest.raises(sealed.UntrustedAdder):
        await keyring.create()
    assert (await owner.pull(keyring.key)).hash == ""


async def test_missing_keyring_is_reported_and_not_created(owner: Client) -> None:
    for call in (ring(owner).open, lambda: ring(owner).add(SUBJECT.kem_pub)):
        with pytest.raises(sealed.KeyringMissing):
            await call()
    assert (await owner.pull("rooms/r1/_keyring")).hash == ""


async def test_keyring_that_goes_back_is_rejected_by_a_reader_of_a_later_one(owner: Client) -> None:
    keyring = ring(owner)
    await keyring.create([SUBJECT.kem_pub, STRANGER.kem_pub])
    old = await owner.pull("rooms/r1/_keyring")
    await keyring.remove(SUBJECT.kem_pub)
    new = await owner.pull("rooms/r1/_keyring")
    await owner.push("rooms/r1/_keyring", old.data, new.hash)
    for call in (
        keyring.open(),
        keyring.add(IdentityKeys.generate().kem_pub),
        keyring.remove(STRANGER.kem_pub),
    ):
        with pytest.raises(sealed.KeyringRolledBack):
            await call
    assert (await ring(owner).open()).epoch == 1
    with pytest.raises(sealed.KeyringRolledBack):
        await ring(owner, min_epoch=2).open()


async def test_recipients_work_on_a_document_that_the_server_cannot_read(
    owner: Client, member: Client
) -> None:
    mine = SyncDocument(owner, "rooms/r1", sealing=await ring(owner).create([SUBJECT.kem_pub]))
    await mine.push({"title": "lunch", "guests": {"a": 1}})
    folded = await owner.pull("rooms/r1", with_keyring=True)
    assert folded.data.keys() == {"_encrypted", "_epoch"}
    assert folded.keyring is not None
    opened = sealed.Keyring(folded.keyring.data).open(SUBJECT, TRUSTED)
    theirs = SyncDocument(member, "rooms/r1", sealing=opened)
    assert await theirs.pull() == {"title": "lunch", "guests": {"a": 1}}
    await theirs.push({"title": "lunch", "guests": {"a": 1, "b": 2}})
    await mine.push({"title": "dinner", "guests": {"a": 1, "c": 3}})  # over the older version: merged, open
    assert mine.data == {"title": "dinner", "guests": {"a": 1, "b": 2, "c": 3}}
    await theirs.update(lambda data: {**data, "n": data["guests"].get("c")})
    assert (await mine.pull())["n"] == 3
    with pytest.raises(Forbidden):
        await member.push("rooms/r1/_keyring", {})


async def test_a_sealed_document_is_given_once_though_each_sealing_is_another(owner: Client) -> None:
    opened = await ring(owner).create()
    document = SyncDocument(owner, "rooms/r1", sealing=opened)
    assert await document.pull() == {}
    await document.push({"a": 1})
    assert not document.is_edited
    document.data = {"a": 2}
    assert document.is_edited


async def test_follower_of_a_sealed_document_receives_its_content(owner: Client) -> None:
    opened = await ring(owner).create()
    await SyncDocument(owner, "rooms/r1", sealing=opened).push({"a": 1})
    async with aclosing(SyncDocument(owner, "rooms/r1", sealing=opened).follow()) as changes:
        assert await anext(changes) == {"a": 1}
        await SyncDocument(owner, "rooms/r1", sealing=opened).update(lambda data: {**data, "b": 2})
        assert await anext(changes) == {"a": 1, "b": 2}


async def test_a_document_that_is_not_sealed_is_not_taken_in(owner: Client) -> None:
    document = SyncDocument(owner, "rooms/r1", sealing=await ring(owner).create())
    await document.push({"a": 1})
    await owner.push("rooms/r1", {"a": 2}, document.hash)
    with pytest.raises(sealed.NotSealed):
        await document.pull()
    with pytest.raises(sealed.NotSealed):
        await document.push({"a": 3})
    assert document.data == {"a": 3}
    assert document.is_edited
    assert (await owner.pull("rooms/r1")).data == {"a": 2}


@pytest.mark.parametrize("hash_", ["", None])
async def test_a_server_gets_nothing_in_unsealed_by_saying_that_nothing_is_stored(hash_: Any) -> None:
    answer = {"data": {"title": "the server's"}, "hash": hash_, "timestamp": 5}
    opened = sealed.UnlockedKeyring(1, {1: bytes(32)})
    async with serving((200, answer)) as server, Client(server.url) as client:
        document = SyncDocument(client, "rooms/r1", sealing=opened)
        with pytest.raises(sealed.NotSealed):
            await document.pull()
    assert (document.data, document.hash) == ({}, "")


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


async def test_sealed_content_may_be_deeper_than_plain_content(owner: Client) -> None:
    document = SyncDocument(owner, "rooms/r1", sealing=await ring(owner).create())
    data = orjson.loads(nested(100))
    await document.push(data)
    assert await document.pull() == data


async def test_too_deep_document_is_reported_and_changes_nothing() -> None:
    opened = sealed.UnlockedKeyring(1, {1: bytes(32)})
    payload = crypto.encrypt(bytes(32), nested(600), b"1", bytes)
    data = {"_encrypted": base64.b64encode(payload).decode(), "_epoch": 1}
    answers = [(200, {"data": data, "hash": "h", "timestamp": 5})] * 2
    async with serving(*answers) as server, Client(server.url) as client:
        document = SyncDocument(client, "rooms/r1", sealing=opened)
        for call in (document.pull(), document.update(lambda data: data)):
            with pytest.raises(BodyTooDeep):
                await call
    assert (document.data, document.hash) == ({}, "")


async def test_keyring_that_is_too_deep_to_be_changed_is_reported() -> None:
    keyring = orjson.dumps(sealed.Keyring.new(ISSUER, now_s=1).data)[:-1] + b',"x":' + nested(900) + b"}"
    answer = b'{"hash":"h","timestamp":5,"data":' + keyring + b"}"
    async with serving((200, answer)) as server, Client(server.url) as client:
        with pytest.raises(BodyTooDeep):
            await ring(client).add(SUBJECT.kem_pub)
