"""The client and the service together: what each promises holds across the wire."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Start, minted_at, root_device
from support.collections import OWN, ROOM, collection

from pysync.auth import issuing
from pysync.auth.certificates import Certificate
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import ChangeEvent, Client, RetryPolicy, SyncDocument
from pysync.errors import Conflict, Forbidden, InvalidPathParameter, StaleGeneration, Unauthorized
from pysync.testing import FakeClock

SERVICE: dict[str, Any] = {
    "collections": [
        collection("rooms", **ROOM),
        collection("keyrings", "rooms/{id}/_keyring", **ROOM),
        collection("own", "users/{identity}/{id}", **OWN, deletable=True),
    ],
    "namespaces": {"acme": {"collections": [collection("rooms", "acme/rooms/{id}", **ROOM)]}},
    "server": {"mountPath": "/v1"},
    "auth": {"trustedIssuers": [ISSUER.ed_pub]},
}
PATIENT = RetryPolicy(attempts=3, initial_s=0.0)
OWNER = root_device(ISSUER, collections=("rooms",))


def origin(base: str) -> str:
    url = urlsplit(base)
    return f"{url.scheme}://{url.netloc}"


def client(
    base: str, keys: IdentityKeys = ISSUER, certificate: Certificate = OWNER, **options: Any
) -> Client:
    return Client(origin(base) + "/v1", keys=keys, certificate=certificate, **options)


async def test_a_signed_document_comes_back_with_its_author_and_keyring(start: Start) -> None:
    data = {"title": "é😀", "n": [1.0, 2.5, {"__proto__": 1}], "constructor": "dropped"}
    async with client(await start(SERVICE)) as owner:
        pushed = await owner.push("rooms/r1", data, sign_author=True)
        ring = await owner.push("rooms/r1/_keyring", {"v": 1})
        pulled = await owner.pull("rooms/r1", with_keyring=True)
    assert pulled.data == {"title": "é😀", "n": [1.0, 2.5, {"__proto__": 1}]}
    assert (pulled.hash, pulled.author_pubkey) == (pushed.hash, ISSUER.ed_pub)
    assert pulled.keyring is not None
    assert (pulled.keyring.data, pulled.keyring.hash) == ({"v": 1}, ring.hash)


async def test_a_missing_document_is_empty_and_has_no_hash(start: Start) -> None:
    async with client(await start(SERVICE)) as owner:
        pulled = await owner.pull("rooms/none", with_keyring=True)
    assert (pulled.data, pulled.hash, pulled.keyring) == ({}, "", None)


async def test_rejections_arrive_as_the_classes_that_the_service_raised(start: Start) -> None:
    base = await start(SERVICE)
    async with client(base) as owner, client(base, STRANGER, root_device(STRANGER)) as stranger:
        first = await owner.push("rooms/r1", {"n": 1})
        second = await owner.push("rooms/r1", {"n": 2}, first.hash)
        with pytest.raises(Conflict) as caught:
            await owner.push("rooms/r1", {"n": 3}, first.hash)
        assert caught.value.current_hash == second.hash
        with pytest.raises(Forbidden):
            await stranger.pull("rooms/r1")
        with pytest.raises(InvalidPathParameter):
            await owner.pull("rooms/a b")


async def test_a_namespaced_client_reaches_its_namespace(start: Start) -> None:
    base = await start(SERVICE)
    namespaced = Client(origin(base), keys=ISSUER, certificate=OWNER, namespace="acme")
    async with namespaced, client(base) as owner:
        pushed = await namespaced.push("acme/rooms/r1", {"n": 1}, sign_author=True)
        assert (await namespaced.pull("acme/rooms/r1")).hash == pushed.hash
        assert (await owner.pull("rooms/r1")).hash == ""


async def test_an_audience_member_presents_its_own_key(start: Start) -> None:
    shared = issuing.issue_audience_certificate(
        ISSUER, "rooms", aud=(SUBJECT.ed_pub,), grant=issuing.writer_grant("rooms"), **minted_at()
    )
    base = await start(SERVICE)
    async with client(base, SUBJECT, shared) as invited, client(base, STRANGER, shared) as other:
        await invited.push("rooms/r1", {"n": 1}, sign_author=True)
        with pytest.raises(Forbidden):
            await other.pull("rooms/r1")


async def test_a_revoked_certificate_is_rejected_and_its_list_is_accepted_once(start: Start) -> None:
    guest = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=issuing.writer_grant("rooms"), **minted_at()
    )
    base = await start(SERVICE)
    async with client(base, SUBJECT, guest) as member, client(base) as owner:
        listed = issuing.issue_revocation_list(ISSUER, 2, certificates=[guest])
        assert await owner.revoke(listed) == 2
        with pytest.raises(Unauthorized):
            await member.pull("rooms/r1")
        await owner.pull("rooms/r1")
        for generation in (1, 2):
            with pytest.raises(StaleGeneration):
                await owner.revoke(issuing.issue_revocation_list(ISSUER, generation))


@asynccontextmanager
async def losing_replies(base: str, answers: int) -> AsyncIterator[str]:
    """The address of a proxy to `base` that hangs up instead of passing on the first `answers` answers."""
    target = urlsplit(base)
    left = answers

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        there, back = await asyncio.open_connection(target.hostname, target.port)
        outward = asyncio.create_task(copy(reader, back))
        try:
            while chunk := await there.read(65_536):
                if left > 0:
                    left -= 1
                    break
                writer.write(chunk)
                await writer.drain()
        finally:
            outward.cancel()
            for end in (back, writer):
                end.close()
                await end.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way.append(asyncio.create_task(serve(reader, writer)))

    under_way: list[asyncio.Task[None]] = []
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as proxy:
        host, port = proxy.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
        await asyncio.gather(*under_way)


async def test_a_push_whose_answer_is_lost_is_applied_once_and_answered_in_the_end(start: Start) -> None:
    base = await start(SERVICE)
    async with losing_replies(base, 2) as lossy, client(lossy, backoff=PATIENT) as owner:
        pushed = await owner.push("rooms/r1", {"n": 1})
        assert (await owner.push("rooms/r1", {"n": 2}, pushed.hash)).hash != pushed.hash
        assert (await owner.pull("rooms/r1")).data == {"n": 2}


async def test_a_pull_whose_answer_is_lost_is_not_taken_for_a_replay(start: Start) -> None:
    base = await start(SERVICE)
    async with losing_replies(base, 3) as lossy, client(lossy, backoff=PATIENT) as owner:
        assert (await owner.pull("rooms/r1")).hash == ""


async def test_devices_that_count_together_lose_no_count(start: Start) -> None:
    base = await start(SERVICE)

    def increment(data: dict[str, Any]) -> dict[str, Any]:
        return {"count": data.get("count", 0) + 1}

    async def count(owner: Client, times: int) -> None:
        async def yield_to_others(_: float) -> None:
            await asyncio.sleep(0)

        document = SyncDocument(owner, "rooms/counter", retries=1000, sleep=yield_to_others)
        for _ in range(times):
            await document.update(increment)

    async with client(base) as owner:
        await asyncio.gather(*(count(owner, 5) for _ in range(8)))
        assert (await owner.pull("rooms/counter")).data == {"count": 40}


async def test_keys_alone_speak_for_months_and_nobody_else_reads_what_is_theirs(start: Start) -> None:
    clock = FakeClock(OWNER.nbf * 1000)
    base = await start(SERVICE, now_ms=clock)
    key = f"users/{ISSUER.user_id}/settings"
    async with (
        Client(base + "/v1", keys=ISSUER, now_ms=clock) as mine,
        Client(base + "/v1", keys=STRANGER, now_ms=clock) as strange,
    ):
        document = SyncDocument(mine, key)
        for month in range(3):
            await document.push({"month": month})
            with pytest.raises(Forbidden):
                await strange.pull(key)
            clock.now_ms += 31 * 24 * 3600 * 1000
        assert (await mine.pull(key)).data == {"month": 2}


async def test_two_devices_end_up_with_the_merge_of_what_both_wrote(start: Start) -> None:
    base = await start(SERVICE)
    phone = issuing.issue_device_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, now_s=OWNER.nbf, nonce=os.urandom(16)
    )
    key = f"users/{ISSUER.user_id}/settings"
    async with client(base) as one, client(base, SUBJECT, phone) as two:
        laptop, mobile = SyncDocument(one, key), SyncDocument(two, key, sign_author=True)
        await laptop.push({"laptop": 1})
        await mobile.push({"mobile": 1})
        assert await laptop.pull() == {"laptop": 1, "mobile": 1} == mobile.data


async def test_deleted_document_is_gone_for_a_follower(start: Start) -> None:
    key = f"users/{ISSUER.user_id}/a"
    async with client(await start(SERVICE)) as owner:
        document = SyncDocument(owner, key)
        follower = document.follow(collection="own")
        assert await anext(follower) == {}
        pushed = await owner.push(key, {"n": 1})
        while await anext(follower) != {"n": 1}:
            pass
        async with owner.watch(["own"]) as changes:
            with pytest.raises(Conflict) as caught:
                await owner.delete(key, "another")
            assert caught.value.current_hash == pushed.hash
            removed = await owner.delete(key, pushed.hash)
            change = await anext(changes)
        assert isinstance(change, ChangeEvent)
        assert (removed.hash, change.removed, change.hash) == ("", True, "")
        assert change.timestamp_ms == removed.timestamp_ms
        while await anext(follower) != {}:
            pass
        assert not (await owner.pull(key)).hash
        await follower.aclose()
        assert (await document.push({"n": 2})).hash


async def test_a_delete_whose_answer_is_lost_is_made_once_and_answered_in_the_end(start: Start) -> None:
    key, base = f"users/{ISSUER.user_id}/a", await start(SERVICE)
    async with client(base) as owner:
        pushed = await owner.push(key, {"n": 1})
    async with losing_replies(base, 2) as lossy, client(lossy, backoff=PATIENT) as owner:
        assert (await owner.delete(key, pushed.hash)).hash == ""
        assert (await owner.pull(key)).hash == ""
