"""The inbox of a replica: what others write arrives, whatever was missed, and what was removed goes."""

import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.bucket_feed import be_bucket
from support.clients import ISSUER, SUBJECT, Start, root_device
from support.collections import OWN, UNSIGNED, collection
from support.http_relay import RequestHead
from support.s3_fault_proxy import FaultProxy

from pysync.auth import issuing
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client, Replica, RetryPolicy, Unreachable
from pysync.client.models import ParamSet
from pysync.client.sealed import DecryptionFailed, Keyring
from pysync.errors import Conflict, Forbidden
from pysync.store import Store

SERVICE: dict[str, Any] = {
    "collections": [
        collection("notes", deletable=True, listable=True),
        collection("plain", deletable=True),
        collection("cells", "sheets/{sheet}/{cell}", deletable=True, listable=True),
        collection("own", "users/{identity}/{id}", **OWN),
        collection("log", appendOnly=UNSIGNED, deletable=True),
        collection("entries", appendOnly={"field": "entries", "requireAuthorSignature": False}),
        collection("files", allowedMimeTypes=["image/png"], deletable=True, listable=True),
    ],
}
ONCE = RetryPolicy(attempts=1, initial_s=0.01, max_s=0.01)
Collections = dict[str, ParamSet | list[ParamSet]]


class Phone:
    """A device whose replica lives in one file, over a network whose requests are counted."""

    def __init__(self, file: Path, network: FaultProxy, direct: Client) -> None:
        self.file = file
        self.network = network
        self.direct = direct

    @asynccontextmanager
    async def replica(self, collections: Collections | None = None, **options: Any) -> AsyncIterator[Replica]:
        collections = collections or {"notes": {}}
        async with (
            Client(self.network.url, backoff=ONCE) as client,
            Replica(self.file, client, collections, **options) as replica,
        ):
            await replica.synced()
            yield replica


@pytest.fixture
async def phone(start: Start, tmp_path: Path, store: Store) -> AsyncIterator[Phone]:
    async with AsyncExitStack() as stack:
        url = await start(SERVICE, store)
        direct = await stack.enter_async_context(Client(url))
        yield Phone(tmp_path / "app.db", await stack.enter_async_context(FaultProxy(url)), direct)


async def test_first_sync_receives_all_of_what_is_followed(phone: Phone) -> None:
    for n in range(230):
        await phone.direct.push(f"notes/n{n:03}", {"n": n})
    await phone.direct.push("plain/a", {"n": 1})
    async with phone.replica() as replica:
        assert replica.keys() == [f"notes/n{n:03}" for n in range(230)]
        assert replica.get("notes/n229") == {"n": 229}
        assert replica.status.error is None


async def test_changes_and_removals_of_others_are_received_after_a_restart(phone: Phone) -> None:
    for name in "abc":
        await phone.direct.push(f"notes/{name}", {"n": 1})
    async with phone.replica():
        pass
    pulled = await phone.direct.pull("notes/a")
    await phone.direct.push("notes/a", {"n": 2}, pulled.hash)
    await phone.direct.delete("notes/b", (await phone.direct.pull("notes/b")).hash)
    phone.network.reset_counts()
    async with phone.replica() as replica:
        assert (replica.get("notes/a"), replica.get("notes/b")) == ({"n": 2}, None)
        assert replica.keys() == ["notes/a", "notes/c"]
    assert phone.network.calls["GET"] <= 4  # a page, a batch, the stream, and the page that it leads to


async def test_changes_of_others_arrive_as_they_happen(phone: Phone) -> None:
    async with phone.replica() as replica:
        changes = replica.changes()
        pushed = await phone.direct.push("notes/a", {"n": 1})
        assert (await anext(changes), replica.get("notes/a")) == ("notes/a", {"n": 1})
        await phone.direct.push("notes/a", {"n": 2}, pushed.hash)
        assert (await anext(changes), replica.get("notes/a")) == ("notes/a", {"n": 2})


async def test_an_edit_that_waits_is_merged_with_what_is_received(phone: Phone) -> None:
    await phone.direct.push("notes/a", {"title": "old", "n": 1})
    async with phone.replica() as replica:
        phone.network.abort("POST", times=None)
        replica.put("notes/a", {"title": "ours", "n": 1})
        pulled = await phone.direct.pull("notes/a")
        await phone.direct.push("notes/a", {"title": "old", "n": 2}, pulled.hash)
        with pytest.raises(Unreachable):
            await replica.synced()
        assert replica.get("notes/a") == {"title": "ours", "n": 2}
        phone.network.reset()
        await replica.synced()
        assert replica.status.unsent == 0
    assert (await phone.direct.pull("notes/a")).data == {"title": "ours", "n": 2}


async def test_a_removal_deletes_the_local_copy_unless_an_edit_waits(phone: Phone) -> None:
    for name in "ab":
        await phone.direct.push(f"notes/{name}", {"n": 1})
    async with phone.replica():
        pass
    for name in "ab":
        await phone.direct.delete(f"notes/{name}", (await phone.direct.pull(f"notes/{name}")).hash)
    phone.network.abort(times=None)
    async with (
        Client(phone.network.url, backoff=ONCE) as client,
        Replica(phone.file, client, {"notes": {}}) as replica,
    ):
        replica.put("notes/a", {"n": 2})
        phone.network.reset()
        await replica.synced()
        assert replica.keys() == ["notes/a"]
    assert (await phone.direct.pull("notes/a")).data == {"n": 2}


async def test_documents_that_were_not_received_yet_can_be_deleted(phone: Phone) -> None:
    await phone.direct.push("notes/a", {"n": 1})
    phone.network.abort(times=None)
    async with (
        Client(phone.network.url, backoff=ONCE) as client,
        Replica(phone.file, client, {"notes": {}}) as replica,
    ):
        replica.delete("notes/a")
        replica.delete("notes/none")
        assert replica.status.unsent == 2
        phone.network.reset()
        await replica.synced()
        assert (replica.keys(), replica.status.unsent, replica.status.rejected) == ([], 0, [])
    assert (await phone.direct.pull("notes/a")).hash == ""


@pytest.mark.parametrize("name", ["log", "entries"])
async def test_newest_elements_of_logs_are_received(phone: Phone, name: str) -> None:
    for n in range(3):
        await phone.direct.append(f"{name}/l", {"n": n})
    async with phone.replica({name: {}}) as replica:
        assert [each.data["n"] for each in replica.tail(f"{name}/l", 2)] == [1, 2]
        assert (replica.keys(), replica.get(f"{name}/l")) == ([f"{name}/l"], None)
    for n in range(3, 1010):
        await phone.direct.append(f"{name}/l", {"n": n})
    async with phone.replica({name: {}}) as replica:
        assert [each.data["n"] for each in replica.tail(f"{name}/l", 2000)] == list(range(10, 1010))
        replica.append(f"{name}/l", {"n": 1010})
        await phone.direct.append(f"{name}/l", {"n": 1011})
        await replica.synced()
        await replica.synced()
        elements = (await phone.direct.pull(f"{name}/l", full=True)).elements(
            name if name == "entries" else "items"
        )
        assert replica.tail(f"{name}/l", 5) == elements[-5:]


async def test_files_are_fetched_on_demand_and_kept_until_they_change(phone: Phone) -> None:
    await phone.direct.push_blob("files/cat", b"one", "image/png")
    async with phone.replica({"files": {}}) as replica:
        assert (replica.keys(), replica.get("files/cat")) == (["files/cat"], None)
        path = await replica.file("files/cat")
        assert path is not None
        assert path.read_bytes() == b"one"
        phone.network.reset_counts()
        assert await replica.file("files/cat") == path
        assert phone.network.calls.total() == 0
        assert await replica.file("files/none") is None
    await phone.direct.push_blob("files/cat", b"two", "image/png")
    async with phone.replica({"files": {}}) as replica:
        newer = await replica.file("files/cat")
        assert newer is not None
        assert newer.read_bytes() == b"two"
    async with phone.replica({"files": {}}):
        assert not path.exists()
        assert newer.exists()


@pytest.mark.parametrize("version", ["../escaped", "{outside}"])
async def test_a_version_that_names_a_path_leads_to_no_other_folder(
    phone: Phone, tmp_path: Path, version: str
) -> None:
    """Another server, or whoever is in its place, chooses the text of versions."""
    outside = tmp_path / "escaped"
    etag = version.format(outside=outside)
    await phone.direct.push_blob("files/cat", b"one", "image/png")
    async with phone.replica({"files": {}}) as replica:
        headers = {"Content-Type": "image/png", "ETag": f'"{etag}"'}
        phone.network.respond(status=200, body=b"evil", headers=headers, times=None)
        path = await replica.file("files/cat")
        assert path is not None
        assert path.read_bytes() == b"evil"
        assert not outside.exists()
        assert path.parent == tmp_path / "app.db-files"


async def test_names_that_make_a_batch_too_long_are_received(phone: Phone) -> None:
    names = [f"{n:03d}".ljust(200, "x") for n in range(100)]
    for name in names:
        await phone.direct.push(f"notes/{name}", {"n": 1})
    async with phone.replica() as replica:
        assert replica.keys() == [f"notes/{name}" for name in names]


@pytest.mark.parametrize("mount", ["", "/v1"])
async def test_a_namespace_below_a_mount_path_is_kept_in_sync(
    start: Start, tmp_path: Path, mount: str
) -> None:
    members = {"namespaces": {"acme": {"collections": [collection("notes", deletable=True, listable=True)]}}}
    url = await start({"collections": [], **members, "server": {"mountPath": mount}})
    async with Client(url, namespace="acme") as client:
        await client.push("notes/a", {"n": 1})
        for n in (1, 2):
            async with Replica(tmp_path / "app.db", client, {"notes": {}}) as replica:
                await replica.synced()
                assert replica.get("notes/a") == {"n": n}
                replica.put("notes/a", {"n": n + 1})
                await replica.synced()
        assert (await client.pull("notes/a")).data == {"n": 3}


async def test_param_sets_narrow_a_collection(phone: Phone) -> None:
    for sheet in "abc":
        await phone.direct.push(f"sheets/{sheet}/x", {"n": 1})
    async with phone.replica({"cells": [{"sheet": "a"}, {"sheet": "b"}]}) as replica:
        assert replica.keys() == ["sheets/a/x", "sheets/b/x"]
        replica.put("sheets/a/y", {"n": 2})
        await replica.synced()
    async with phone.replica({"cells": [{"sheet": "b"}, {"sheet": "c"}]}) as replica:
        assert replica.keys() == ["sheets/b/x", "sheets/c/x"]


async def test_edits_of_a_collection_that_is_not_followed_any_more_are_still_sent(phone: Phone) -> None:
    async with phone.replica({"notes": {}, "plain": {}}) as replica:
        phone.network.abort(times=None)
        replica.put("plain/a", {"n": 1})
    phone.network.reset()
    async with phone.replica({"notes": {}}) as replica:
        assert replica.status.unsent == 0
    assert (await phone.direct.pull("plain/a")).data == {"n": 1}


ROOMS: dict[str, Any] = {
    "collections": [
        collection("rooms", "rooms/{id}", readRoles=["cap:read:rooms"], writeRoles=["public"], listable=True),
        collection("notes"),
    ],
    "auth": {"trustedIssuers": [ISSUER.ed_pub]},
}


async def test_a_collection_that_may_be_read_again_begins_anew_and_keeps_its_copies_until_then(
    start: Start, tmp_path: Path
) -> None:
    """Meanwhile other collections go on, and what was written and removed is not missed."""
    url = await start(ROOMS)
    allowed, denied = root_device(ISSUER, collections=("rooms",)), root_device(ISSUER, collections=("notes",))
    async with Client(url) as other, Client(url, keys=ISSUER, certificate=allowed) as client:
        await other.push("rooms/a", {"n": 1})
        async with Replica(tmp_path / "app.db", client, {"rooms": {}, "notes": {}}) as replica:
            await replica.synced()
            assert replica.get("rooms/a") == {"n": 1}
            client.certificate = denied
            await other.push("rooms/b", {"n": 1})
            await other.push("notes/a", {"n": 1})
            await replica.synced()
            assert isinstance(replica.status.error, Forbidden)
            assert replica.keys() == ["notes/a", "rooms/a"]
            client.certificate = allowed
            await replica.synced()
            assert replica.status.error is None
            assert replica.keys() == ["notes/a", "rooms/a", "rooms/b"]


async def test_a_certificate_that_allows_more_begins_everything_anew(start: Start, tmp_path: Path) -> None:
    url = await start(ROOMS)
    grant = issuing.Grant(ops=("read", "write", "list"), paths=("rooms/a",))
    some = root_device(ISSUER, collections=("rooms",), grant=grant)
    async with Client(url) as other, Client(url, keys=ISSUER, certificate=some) as client:
        for name in "ab":
            await other.push(f"rooms/{name}", {"n": 1})
        async with Replica(tmp_path / "app.db", client, {"rooms": {}}) as replica:
            await replica.synced()
            assert replica.keys() == ["rooms/a"]
            client.certificate = root_device(ISSUER, collections=("rooms",))
            await replica.synced()
            assert replica.keys() == ["rooms/a", "rooms/b"]
            client.certificate = some
            await replica.synced()
            assert replica.keys() == ["rooms/a", "rooms/b"]  # copies stay


async def test_a_new_member_of_a_space_receives_what_is_there(start: Start, tmp_path: Path) -> None:
    """Also if the replica is closed before it has asked for it."""
    me, owner = SUBJECT.user_id, ISSUER.user_id
    spaces = {
        "collections": [
            collection("access", "s/{space}/_access", readRoles=["space:member"], writeRoles=["space:owner"]),
            collection("docs", "s/{space}/{id}", readRoles=["space:member"], writeRoles=["space:member"]),
        ],
        "auth": {"spaces": {"accessPath": "s/{space}/_access", "param": "space"}},
    }
    url = await start(spaces)
    params: Collections = {"docs": {}, "access": {}}
    async with Client(url, keys=ISSUER) as other, FaultProxy(url) as network:
        for space in "ab":
            await other.push(f"s/{space}/_access", {"owner": owner})
            await other.push(f"s/{space}/doc", {"n": space})
        client = Client(network.url, keys=SUBJECT, backoff=ONCE)
        async with client, Replica(tmp_path / "app.db", client, params) as replica:
            await replica.synced()
            assert replica.keys() == []
            access = await other.pull("s/a/_access")
            network.abort(when=lambda sent: sent.path == "changes" and "since" not in sent.query, times=None)
            await other.push("s/a/_access", {"owner": owner, "members": [me]}, access.hash)
            with pytest.raises(Unreachable):
                await replica.synced()
        client = Client(network.url, keys=SUBJECT, backoff=ONCE)
        async with client, Replica(tmp_path / "app.db", client, params) as replica:
            assert replica.keys() == ["s/a/_access"]
            network.reset()
            await replica.synced()
            assert replica.keys() == ["s/a/_access", "s/a/doc"]


async def test_sealed_documents_and_elements_are_sealed_in_the_file(phone: Phone) -> None:
    me = IdentityKeys.generate()
    unlocked = Keyring.new(me, now_s=1).open(me, [me.ed_pub])
    await phone.direct.push("notes/a", unlocked.seal({"text": "secret"}))
    await phone.direct.append("log/a", unlocked.seal({"text": "secret"}))
    await phone.direct.append("log/a", {"text": "plain"})
    async with phone.replica({"notes": {}, "log": {}}, sealing=unlocked) as replica:
        assert replica.get("notes/a") == {"text": "secret"}
        assert [each.data["text"] for each in replica.tail("log/a", 9)] == ["secret", "plain"]
    assert b"secret" not in phone.file.read_bytes()
    async with phone.replica(
        {"notes": {}}, sealing=Keyring.new(me, now_s=1).open(me, [me.ed_pub])
    ) as replica:
        with pytest.raises(DecryptionFailed):
            replica.get("notes/a")


class Traffic:
    """What is requested of a server, by the first word of the path."""

    def __init__(self, network: FaultProxy) -> None:
        self.paths: list[str] = []
        network.abort(when=self._note)

    def _note(self, sent: RequestHead) -> bool:
        self.paths.append(sent.path.split("/")[0])
        return False


async def test_a_reset_is_followed_by_a_comparison_with_hashes(phone: Phone) -> None:
    """Of 230 documents one batch is fetched: what changed, and what is new; what is gone is asked for."""
    await fill(phone)
    async with phone.replica():
        pass
    forget_cursor(phone.file)
    await change_some(phone)
    traffic = Traffic(phone.network)
    async with phone.replica() as replica:
        check_some(replica)
    requested = [path for path in traffic.paths if path != "events"]
    assert requested[:4] == ["changes", "list", "batch", "batch"]


@pytest.mark.parametrize("name", ["plain", "cells"])
async def test_collections_that_cannot_be_listed_are_compared_with_the_feed(phone: Phone, name: str) -> None:
    prefix = {"plain": "plain", "cells": "sheets/a"}[name]
    for key in ("same", "changed", "removed"):
        await phone.direct.push(f"{prefix}/{key}", {"n": 1})
    async with phone.replica({name: {}}):
        pass
    forget_cursor(phone.file)
    pulled = await phone.direct.pull(f"{prefix}/changed")
    await phone.direct.push(f"{prefix}/changed", {"n": 2}, pulled.hash)
    await phone.direct.delete(f"{prefix}/removed", (await phone.direct.pull(f"{prefix}/removed")).hash)
    await phone.direct.push(f"{prefix}/new", {"n": 1})
    async with phone.replica({name: {}}) as replica:
        assert {key: replica.get(key) for key in sorted(replica.keys())} == {
            f"{prefix}/changed": {"n": 2},
            f"{prefix}/new": {"n": 1},
            f"{prefix}/same": {"n": 1},
        }


async def test_a_copy_stays_while_that_of_the_server_is_damaged(phone: Phone, store: Store) -> None:
    await phone.direct.push("plain/a", {"n": 1})
    async with phone.replica({"plain": {}}):
        pass
    forget_cursor(phone.file)
    await store.put("plain/a", b"damaged")
    async with phone.replica({"plain": {}}) as replica:
        assert replica.get("plain/a") == {"n": 1}


async def test_logs_and_files_are_compared_too(phone: Phone) -> None:
    collections: Collections = {"log": {}, "files": {}}
    for key in ("same", "changed", "removed"):
        await phone.direct.append(f"log/{key}", {"n": 1})
        await phone.direct.push_blob(f"files/{key}", b"1", "image/png")
    async with phone.replica(collections):
        pass
    forget_cursor(phone.file)
    await phone.direct.append("log/changed", {"n": 2})
    await phone.direct.push_blob("files/changed", b"2", "image/png")
    await phone.direct.delete("log/removed", (await phone.direct.pull("log/removed", last=0)).hash)
    await phone.direct.delete("files/removed", hashlib.sha256(b"1").hexdigest())
    async with phone.replica(collections) as replica:
        assert replica.keys() == ["files/changed", "files/same", "log/changed", "log/same"]
        assert [each.data for each in replica.tail("log/changed", 9)] == [{"n": 1}, {"n": 2}]
        path = await replica.file("files/changed")
        assert path is not None
        assert path.read_bytes() == b"2"


async def test_files_of_a_list_and_of_no_list_can_be_deleted(phone: Phone) -> None:
    for name in ("listed", "changed", "unknown"):
        await phone.direct.push_blob(f"files/{name}", b"1", "image/png")
    async with phone.replica({"files": {}}):
        pass
    forget_cursor(phone.file)
    for name in ("listed", "changed"):
        await phone.direct.push_blob(f"files/{name}", b"2", "image/png")
    async with phone.replica({"files": {}}) as replica:
        assert await replica.file("files/unknown")
    async with phone.replica({"files": {}}) as replica:
        phone.network.abort(times=None)
        for name in ("listed", "changed", "unknown"):
            replica.delete(f"files/{name}")
        await phone.direct.push_blob("files/changed", b"3", "image/png")
        phone.network.reset()
        await replica.synced()
        assert (replica.keys(), replica.status.rejected) == (["files/changed"], [])
    phone.file.unlink()
    async with phone.replica({"notes": {}}) as replica:
        replica.delete("files/changed")
        await replica.synced()
        assert replica.status.rejected == []
    assert await phone.direct.pull_blob("files/changed") is None


async def test_a_bucket_is_compared_by_names_and_known_hashes(phone: Phone) -> None:
    """It has no feed from the beginning, and no hashes in lists."""
    await fill(phone)

    async def receive(check: Callable[[Replica], object]) -> None:
        be_bucket(phone.network)
        async with phone.replica({"notes": {}}) as replica:
            check(replica)

    await receive(check_all)
    await change_some(phone)
    await receive(check_some)


async def test_the_application_decides_what_a_restored_bucket_gets_back(phone: Phone) -> None:
    """The bucket cannot say when its versions were written. What it does not have at all it gets."""
    for name in ("same", "older", "missing"):
        await phone.direct.push(f"notes/{name}", {"n": 1})
    async with phone.replica():
        pass
    pulled = await phone.direct.pull("notes/older")
    await phone.direct.push("notes/older", {"n": 0}, pulled.hash)
    await phone.direct.delete("notes/missing", (await phone.direct.pull("notes/missing")).hash)
    be_bucket(phone.network, restored=1)
    async with phone.replica() as replica:
        await replica.synced()
        (rejected,) = replica.status.rejected
        assert (rejected.key, rejected.data) == ("notes/older", {"n": 1})
        assert isinstance(rejected.error, Conflict)
        assert replica.get("notes/older") == {"n": 0}
        assert (await phone.direct.pull("notes/missing")).data == replica.get("notes/missing") == {"n": 1}
        replica.retry("notes/older")
        await replica.synced()
        assert (replica.status.unsent, replica.status.rejected) == (0, [])
    assert (await phone.direct.pull("notes/older")).data == {"n": 1}


async def test_an_edit_that_waits_hides_nothing_of_what_a_restored_bucket_has_lost(phone: Phone) -> None:
    await phone.direct.push("notes/a", {"n": 1, "k": 1})
    async with phone.replica():
        pass
    await phone.direct.push("notes/a", {"n": 0}, (await phone.direct.pull("notes/a")).hash)
    be_bucket(phone.network, restored=1)
    client = Client(phone.network.url, backoff=ONCE)
    async with client, Replica(phone.file, client, {"notes": {}}) as replica:
        replica.put("notes/a", {"n": 1, "k": 1, "m": 2})
        await replica.synced()
        (rejected,) = replica.status.rejected
        assert rejected.data == {"n": 1, "k": 1, "m": 2}


async def fill(phone: Phone) -> None:
    for n in range(230):
        await phone.direct.push(f"notes/n{n:03}", {"n": n})


def check_all(replica: Replica) -> None:
    assert replica.keys() == [f"notes/n{n:03}" for n in range(230)]


async def change_some(phone: Phone) -> None:
    pulled = await phone.direct.pull("notes/n001")
    await phone.direct.push("notes/n001", {"n": "changed"}, pulled.hash)
    await phone.direct.delete("notes/n002", (await phone.direct.pull("notes/n002")).hash)
    await phone.direct.push("notes/new", {"n": "new"})


def check_some(replica: Replica) -> None:
    assert replica.keys() == [f"notes/n{n:03}" for n in range(230) if n != 2] + ["notes/new"]
    found = [replica.get(f"notes/{name}") for name in ("n000", "n001", "n002", "new")]
    assert found == [{"n": 0}, {"n": "changed"}, None, {"n": "new"}]


def forget_cursor(file: Path) -> None:
    """Have the replica come back with a cursor of another log, as after the loss of the server's."""
    database = sqlite3.connect(file)
    database.execute("UPDATE feed SET cursor = '00000000000000001-00000000'")
    database.commit()
    database.close()
