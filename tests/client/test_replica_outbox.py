"""The outbox of a replica: each edit reaches the server once and in order, or is kept with the error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict
from support.clients import ISSUER, Start, root_device
from support.collections import OWN, UNSIGNED, collection
from support.http_relay import RequestHead
from support.s3_fault_proxy import FaultProxy

from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.issuing import issue_device_certificate
from pysync.client import MISSING, Client, Replica, RetryPolicy, Unreachable
from pysync.client.sealed import Keyring, NotSealed
from pysync.errors import (
    NotFound,
    OutcomeUnknown,
    PayloadTooLarge,
    SchemaViolation,
    Unauthorized,
)

SERVICE: dict[str, Any] = {
    "collections": [
        collection("notes", deletable=True, maxBodyBytes=4096),
        collection("diary", "diary/{identity}/{id}", **OWN, appendOnly=UNSIGNED),
        collection("readonly", pullOnly=True, readRoles=["public"], writeRoles=[]),
        collection("log", appendOnly=UNSIGNED, maxBodyBytes=4096),
        collection("letters", readRoles=["admin"], appendOnly=UNSIGNED),
        collection("typed", objectSchema={"type": "object", "required": ["age"]}),
        collection("files", allowedMimeTypes=["image/png"]),
    ],
}
ONCE = RetryPolicy(attempts=1, initial_s=0.01, max_s=0.01)
MINUTE_MS = 60_000


class Phone:
    """A device whose replica lives in one file, over a network that fails on demand."""

    def __init__(self, file: Path, network: FaultProxy, direct: Client) -> None:
        self.file = file
        self.network = network
        self.direct = direct
        self.now_ms = 1_800_000_000_000

    @asynccontextmanager
    async def replica(self, **options: Any) -> AsyncIterator[Replica]:
        async with (
            Client(self.network.url, backoff=ONCE) as client,
            Replica(self.file, client, {"notes": {}}, now_ms=lambda: self.now_ms, **options) as replica,
        ):
            yield replica

    def lose_replies(self, times: int | None = 1) -> None:
        """Lose the answers of writes, which are carried out."""
        self.network.lose_reply(when=is_write, times=times)

    def forget_keys(self) -> None:
        """Have the server know no idempotency key, as ten minutes later."""

        def drop(headers: CIMultiDict[str]) -> None:
            headers.popall("Idempotency-Key", None)

        self.network.rewrite(drop)

    def be_away(self) -> None:
        self.network.abort(times=None)


def is_done(replica: Replica) -> bool:
    """Return True if nothing waits, was rejected or is wrong."""
    status = replica.status
    return (status.online, status.unsent, status.rejected, status.error) == (True, 0, [], None)


def is_write(sent: RequestHead) -> bool:
    return sent.path.startswith("push/")


@pytest.fixture
async def phone(start: Start, tmp_path: Path) -> AsyncIterator[Phone]:
    async with AsyncExitStack() as stack:
        url = await start(SERVICE)
        direct = await stack.enter_async_context(Client(url))
        yield Phone(tmp_path / "app.db", await stack.enter_async_context(FaultProxy(url)), direct)


async def test_edits_reach_the_server(phone: Phone) -> None:
    async with phone.replica() as replica:
        replica.put("notes/a", {"n": 1})
        replica.put("notes/b", {"n": 1})
        replica.append("log/l", {"n": 1})
        await replica.synced()
        assert is_done(replica)
        replica.put("notes/a", {"n": 2})
        replica.delete("notes/b")
        replica.append("log/l", {"n": 2})
        await replica.synced()
        assert (await phone.direct.pull("notes/a")).data == replica.get("notes/a") == {"n": 2}
        assert (await phone.direct.pull("notes/b")).hash == ""
        assert replica.get("notes/b") is None
        elements = (await phone.direct.pull("log/l", full=True)).elements()
        assert [element.data for element in elements] == [{"n": 1}, {"n": 2}]
        assert replica.tail("log/l", 9) == elements


async def test_edits_are_sent_without_being_asked_for(phone: Phone) -> None:
    async with phone.replica() as replica:
        changes = replica.changes()
        await replica.synced()
        replica.append("log/l", {"n": 1})
        assert [await anext(changes), await anext(changes)] == ["log/l"] * 2  # made, and accepted
        assert replica.status.unsent == 0


async def test_replica_opens_while_the_server_is_away_and_sends_later(phone: Phone) -> None:
    phone.be_away()
    async with phone.replica() as replica:
        replica.put("notes/a", {"n": 1})
        with pytest.raises(Unreachable):
            await replica.synced()
        assert (replica.status.online, replica.status.unsent) == (False, 1)
        assert isinstance(replica.status.error, Unreachable)
        phone.network.reset()
        await replica.synced()
        assert is_done(replica)
    assert (await phone.direct.pull("notes/a")).data == {"n": 1}


async def test_edits_of_an_earlier_process_are_sent(phone: Phone) -> None:
    phone.be_away()
    async with phone.replica() as replica:
        replica.put("notes/a", {"n": 1})
    phone.network.reset()
    async with phone.replica() as replica:
        await replica.synced()
    assert (await phone.direct.pull("notes/a")).data == {"n": 1}


async def test_lost_answers_double_nothing(phone: Phone) -> None:
    """Neither while the server knows the idempotency key, nor for a push whose hash it has."""
    phone.lose_replies()
    async with phone.replica() as replica:
        replica.append("log/l", {"n": 1})
        with pytest.raises(Unreachable):
            await replica.synced()
        await replica.synced()
    assert len((await phone.direct.pull("log/l", full=True)).elements()) == 1


async def test_a_conflict_with_what_was_sent_is_a_success(phone: Phone) -> None:
    """The first push is carried out, without an answer and without a memory of its key."""
    phone.forget_keys()
    phone.lose_replies()
    async with phone.replica() as replica:
        replica.put("notes/a", {"n": 1})
        with pytest.raises(Unreachable):
            await replica.synced()
        replica.put("notes/a", {"n": 2})
        await replica.synced()
        assert (replica.status.unsent, list(replica.dropped)) == (0, [])
    assert (await phone.direct.pull("notes/a")).data == {"n": 2}


async def test_a_deletion_whose_answer_was_lost_is_not_repeated_on_what_came_after(phone: Phone) -> None:
    phone.forget_keys()
    async with phone.replica() as replica:
        replica.put("notes/a", {"n": 1})
        await replica.synced()
        phone.lose_replies(2)  # a DELETE on a kept connection is sent twice
        replica.delete("notes/a")
        with pytest.raises(Unreachable):
            await replica.synced()
        await phone.direct.push("notes/a", {"n": 2})
        await replica.synced()
        assert replica.get("notes/a") == {"n": 2}
    assert (await phone.direct.pull("notes/a")).data == {"n": 2}


async def test_conflicting_edits_are_merged_as_in_a_sync_document(phone: Phone) -> None:
    async with phone.replica(id_member="name", on_conflict=lambda conflict: conflict.remote) as replica:
        replica.put("notes/a", {"title": "old", "items": [{"name": "milk"}]})
        await replica.synced()
        pulled = await phone.direct.pull("notes/a")
        theirs = {"title": "theirs", "items": [{"name": "milk"}, {"name": "bread"}]}
        await phone.direct.push("notes/a", theirs, pulled.hash)
        replica.put("notes/a", {"title": "ours", "items": [{"name": "milk"}, {"name": "eggs"}]})
        await replica.synced()
        merged = {"title": "theirs", "items": [{"name": "milk"}, {"name": "bread"}, {"name": "eggs"}]}
        assert replica.get("notes/a") == merged
        assert [(key, each.path, each.value) for key, each in replica.dropped] == [
            ("notes/a", ("title",), "ours")
        ]
    assert (await phone.direct.pull("notes/a")).data == merged


async def test_an_edit_wins_over_a_removal_and_over_a_deletion(phone: Phone) -> None:
    async with phone.replica() as replica:
        for key in ("notes/removed", "notes/edited"):
            replica.put(key, {"n": 1})
        await replica.synced()
        removed, edited = [await phone.direct.pull(key) for key in ("notes/removed", "notes/edited")]
        await phone.direct.delete("notes/removed", removed.hash)
        await phone.direct.push("notes/edited", {"n": 2}, edited.hash)
        replica.put("notes/removed", {"n": 3})
        replica.delete("notes/edited")
        await replica.synced()
        assert (replica.get("notes/removed"), replica.get("notes/edited")) == ({"n": 3}, {"n": 2})
        lost = [(key, each.path, each.value) for key, each in replica.dropped if each.local]
        assert ("notes/edited", (), MISSING) in lost
    assert (await phone.direct.pull("notes/removed")).data == {"n": 3}
    assert (await phone.direct.pull("notes/edited")).data == {"n": 2}


async def test_an_edit_that_is_made_while_another_is_on_its_way_follows_it(phone: Phone) -> None:
    release = asyncio.Event()
    arrived = phone.network.delay(until=release, when=is_write)
    async with phone.replica() as replica:
        replica.put("notes/a", {"n": 1})
        await arrived.wait()
        replica.put("notes/a", {"n": 2})
        release.set()
        await replica.synced()
        assert (replica.get("notes/a"), replica.status.unsent) == ({"n": 2}, 0)
    assert (await phone.direct.pull("notes/a")).data == {"n": 2}


@pytest.mark.parametrize(
    ("key", "data", "kind"),
    [
        ("readonly/a", {"n": 1}, NotFound),
        ("notes/a", {"text": "x" * 5000}, PayloadTooLarge),
        ("typed/a", {"n": 1}, SchemaViolation),
        ("unknown/a", {"n": 1}, NotFound),
    ],
)
async def test_an_edit_that_is_rejected_is_kept_and_does_not_stop_others(
    phone: Phone, key: str, data: dict[str, Any], kind: type[Exception]
) -> None:
    async with phone.replica() as replica:
        replica.put(key, data)
        replica.put("notes/other", {"n": 1})
        await replica.synced()
        (rejected,) = replica.status.rejected
        assert (rejected.key, rejected.kind, rejected.data) == (key, "put", data)
        assert isinstance(rejected.error, kind)
        assert (replica.get(key), replica.status.unsent) == (None, 0)
        assert replica.get("notes/other") == {"n": 1}
    async with phone.replica() as replica:
        await replica.synced()
        assert [each.data for each in replica.status.rejected] == [data]
        changes = replica.changes()
        replica.discard(key)
        assert await anext(changes) == key
        assert replica.status.rejected == []


async def test_an_edit_that_is_retried_is_merged_with_what_is_there(phone: Phone) -> None:
    async with phone.replica() as replica:
        replica.put("notes/a", {"n": 1})
        await replica.synced()
        replica.put("notes/a", {"n": 1, "text": "x" * 5000})
        await replica.synced()
        assert replica.get("notes/a") == {"n": 1}
        replica.put("notes/a", {"n": 2})
        await replica.synced()
        replica.retry("notes/a")
        assert replica.get("notes/a") == {"n": 1, "text": "x" * 5000}
        replica.put("notes/a", {"n": 1, "text": "y"})
        await replica.synced()
        assert (replica.get("notes/a"), replica.status.rejected) == ({"n": 2, "text": "y"}, [])


async def test_an_edit_that_is_retried_is_merged_with_one_that_waits(phone: Phone) -> None:
    async with phone.replica() as replica:
        replica.put("notes/a", {"text": "x" * 5000, "m": 1})
        await replica.synced()
        phone.be_away()
        replica.put("notes/a", {"text": "y"})
        replica.retry("notes/a")
        assert replica.get("notes/a") == {"text": "y", "m": 1}
        assert (replica.status.unsent, replica.status.rejected) == (1, [])


async def test_a_newer_edit_is_sent_although_the_one_on_its_way_is_rejected(phone: Phone) -> None:
    release = asyncio.Event()
    arrived = phone.network.delay(until=release, when=is_write)
    async with phone.replica() as replica:
        replica.put("notes/a", {"text": "x" * 5000})
        await arrived.wait()
        replica.put("notes/a", {"text": "y"})
        release.set()
        await replica.synced()
        assert (replica.get("notes/a"), replica.status.rejected) == ({"text": "y"}, [])


async def test_a_rejected_append_does_not_stop_the_next(phone: Phone) -> None:
    async with phone.replica() as replica:
        replica.append("log/l", {"text": "x" * 5000})
        replica.append("log/l", {"n": 2})
        await replica.synced()
        (rejected,) = replica.status.rejected
        assert (rejected.kind, rejected.data) == ("append", {"text": "x" * 5000})
        assert [element.data for element in replica.tail("log/l", 9)] == [{"n": 2}]


@pytest.mark.parametrize("minutes", [11, -11])
async def test_an_old_append_without_an_answer_is_looked_for_in_the_log(phone: Phone, minutes: int) -> None:
    """Twice the same data is two elements, one of which has been accepted; a clock that was set back makes
    any append an old one."""
    async with phone.replica() as replica:
        replica.append("log/l", {"n": 1})
        await replica.synced()
        phone.lose_replies()
        replica.append("log/l", {"n": 1})
        replica.append("log/l", {"n": 1})
        with pytest.raises(Unreachable):
            await replica.synced()
        phone.be_away()
    phone.now_ms += minutes * MINUTE_MS
    phone.network.reset()
    phone.forget_keys()
    async with phone.replica() as replica:
        await replica.synced()
        elements = (await phone.direct.pull("log/l", full=True)).elements()
        assert [element.data for element in elements] == [{"n": 1}] * 3
        assert replica.tail("log/l", 9) == elements


async def test_an_old_append_that_never_arrived_is_sent_again(phone: Phone) -> None:
    phone.network.abort(when=is_write)
    async with phone.replica() as replica:
        replica.append("log/l", {"n": 1})
        with pytest.raises(Unreachable):
            await replica.synced()
        phone.now_ms += 11 * MINUTE_MS
        await phone.direct.append("log/l", {"n": 2})
        await replica.synced()
    elements = (await phone.direct.pull("log/l", full=True)).elements()
    assert [element.data for element in elements] == [{"n": 2}, {"n": 1}]


async def test_an_old_append_to_a_log_that_may_not_be_read_waits_for_a_decision(phone: Phone) -> None:
    phone.lose_replies()
    async with phone.replica() as replica:
        replica.append("letters/l", {"n": 1})
        with pytest.raises(Unreachable):
            await replica.synced()
        phone.now_ms += 11 * MINUTE_MS
        await replica.synced()
        (rejected,) = replica.status.rejected
        assert (rejected.key, rejected.data, type(rejected.error)) == ("letters/l", {"n": 1}, OutcomeUnknown)
        replica.retry("letters/l")
        await replica.synced()
        assert (replica.status.unsent, replica.status.rejected) == (0, [])


async def test_sealed_data_is_sealed_on_its_way_and_repeated_as_it_was(phone: Phone) -> None:
    me = IdentityKeys.generate()
    unlocked = Keyring.new(me, now_s=1).open(me, [me.ed_pub])
    phone.lose_replies()
    async with phone.replica(sealing=unlocked) as replica:
        replica.put("notes/a", {"n": 1})
        replica.append("log/l", {"n": 1})
        with pytest.raises(Unreachable):
            await replica.synced()
        await replica.synced()
        await replica.synced()
        pulled = await phone.direct.pull("notes/a")
        (element,) = (await phone.direct.pull("log/l", full=True)).elements()
        assert unlocked.open(pulled.data) == replica.get("notes/a") == {"n": 1}
        assert unlocked.open(element.data) == {"n": 1}
        assert [each.data for each in replica.tail("log/l", 9)] == [{"n": 1}]


async def test_an_edit_does_not_replace_what_cannot_be_opened(phone: Phone) -> None:
    me = IdentityKeys.generate()
    pushed = await phone.direct.push("notes/a", {"plain": 1})
    async with phone.replica(sealing=Keyring.new(me, now_s=1).open(me, [me.ed_pub])) as replica:
        replica.put("notes/a", {"n": 1})
        replica.put("notes/b", {"n": 1})
        await replica.synced()
        (rejected,) = replica.status.rejected
        assert (rejected.key, rejected.data) == ("notes/a", {"n": 1})
        with pytest.raises(NotSealed):
            replica.get("notes/a")
        assert replica.get("notes/b") == {"n": 1}
    assert (await phone.direct.pull("notes/a")).hash == pushed.hash


async def test_401_stops_sending_until_the_client_has_another_certificate(
    start: Start, tmp_path: Path
) -> None:
    key = f"diary/{ISSUER.user_id}/a"
    expired = issue_device_certificate(
        ISSUER, ISSUER.ed_pub, ISSUER.kem_pub, now_s=1, nonce=bytes(16), expires_at_s=2
    )
    async with (
        Client(await start(SERVICE), keys=ISSUER, certificate=expired, backoff=ONCE) as client,
        Replica(tmp_path / "app.db", client, {"diary": {}}) as replica,
    ):
        replica.append(key, {"n": 1})
        with pytest.raises(Unauthorized):
            await replica.synced()
        assert isinstance(replica.status.error, Unauthorized)
        assert (replica.status.online, replica.status.unsent) == (True, 1)
        changes = replica.changes()
        client.certificate = root_device(ISSUER)
        assert await anext(changes) == key
        await replica.synced()
        assert is_done(replica)
