"""A replica that comes back: after a reset of the feed, a restore, an erasure, and a change of its rights."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell
from support.clients import SUBJECT
from support.collections import collection
from support.replicas import COLLECTIONS, DAY_MS, DOC, LOG, ME, Site, tail_of

from pysync.client import Replica
from pysync.client.sealed import UnlockedKeyring
from pysync.clock import wall_clock_ms
from pysync.erase import EraseRequest
from pysync.errors import Forbidden
from pysync.testing import FakeClock

MEMBER = SUBJECT.user_id
SPACE = "spaces/one"
PLAN = f"{SPACE}/plans/a"
PLANS = {"access": {"spaceId": "one"}, "plans": {"spaceId": "one"}}
SPACES = [
    collection("access", "spaces/{spaceId}/_access", readRoles=["space:member"], writeRoles=["space:owner"]),
    collection(
        "plans",
        "spaces/{spaceId}/plans/{id}",
        readRoles=["space:member"],
        writeRoles=["space:member"],
        listable=True,
        fieldPermissions={"price": {"readRoles": ["space:owner"], "writeRoles": ["space:owner"]}},
    ),
]


@pytest.fixture
def clock() -> FakeClock:
    """A clock that begins with the time of the machine, which backups have."""
    return FakeClock(wall_clock_ms())


@pytest.fixture
async def site(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Site]:
    members: dict[str, Any] = {"collections": [*COLLECTIONS, *SPACES], "auth": {"spaces": {}}}
    async with Site(tmp_path, clock, **members) as site:
        yield site


def doc(name: str) -> str:
    return f"users/{ME}/docs/{name}"


def held(replica: Replica) -> dict[str, Any]:
    """The documents of a replica."""
    return {key.rpartition("/")[2]: replica.get(key) for key in replica.keys(doc(""))}


async def stored(site: Site) -> dict[str, Any]:
    """The documents of the server."""
    async with site.client() as client:
        names = [name async for name in client.list(f"users/{ME}/docs")]
        return {name: (await client.pull(doc(name))).data for name in names}


async def test_returning_after_a_reset_removes_what_was_removed_meanwhile(site: Site) -> None:
    for name in "abc":
        await site.push({"n": name}, doc(name))
    async with site.device() as phone:
        await phone.synced()
        assert held(phone) == await stored(site)
    async with site.device("laptop") as laptop:
        laptop.delete(doc("a"))
        laptop.put(doc("b"), {"n": 2})
        await laptop.synced()
    site.clock.now_ms += 200 * DAY_MS  # removals are forgotten
    await site.service.stop()
    await site.service.start()
    await site.push({"n": "d"}, doc("d"))
    async with site.device() as phone:
        await phone.synced()
        assert held(phone) == {"b": {"n": 2}, "c": {"n": "c"}, "d": {"n": "d"}} == await stored(site)


async def test_folder_put_back_from_an_older_copy_is_noticed(site: Site) -> None:
    """The replica's cursor is one of changes that were lost, and as many others have been made since."""
    await site.push({"n": 1})
    await site.service.stop()
    shutil.copytree(site.service.folder, site.folder / "copy")
    await site.service.start()
    async with site.device() as phone:
        await site.push({"n": 2})
        await site.push({"n": 2}, doc("lost"))
        await phone.synced()
        assert held(phone) == {"a": {"n": 2}, "lost": {"n": 2}}
    await site.service.stop()
    shutil.rmtree(site.service.folder)
    shutil.move(site.folder / "copy", site.service.folder)
    await site.service.start()
    for n in range(9):
        await site.push({"n": n}, doc("new"))
    async with site.device() as phone:
        phone.put(doc("mine"), {"n": 3})
        await phone.synced()
        assert held(phone) == {"a": {"n": 1}, "new": {"n": 8}, "mine": {"n": 3}} == await stored(site)


async def test_elements_that_a_log_lost_leave_the_tail(site: Site) -> None:
    async with site.client() as other:
        await other.append(LOG, {"n": 1})
        await site.service.stop()
        shutil.copytree(site.service.folder, site.folder / "copy")
        await site.service.start()
        async with site.device() as phone:
            await other.append(LOG, {"n": 2})
            await phone.synced()
            assert tail_of(phone) == [{"n": 1}, {"n": 2}]
        await site.service.stop()
        shutil.rmtree(site.service.folder)
        shutil.move(site.folder / "copy", site.service.folder)
        await site.service.start()
        for n in (12, 13):
            await other.append(LOG, {"n": n})
        async with site.device() as phone:
            await phone.synced()
            assert tail_of(phone) == [{"n": 1}, {"n": 12}, {"n": 13}]


async def back_up(site: Site, shell: Shell) -> None:
    arguments = ("backup", "--store", f"file:{site.service.folder}", "--to", f"file:{site.folder}/backup")
    assert (await shell.run_async(*arguments))[0] == 0


async def restore(site: Site, shell: Shell, *options: str) -> None:
    """Replace the folder of the service with the newest snapshot."""
    await site.service.stop()
    shutil.rmtree(site.service.folder)
    status, _, errors = await shell.run_async(
        "backup", "restore", "--from", f"file:{site.folder}/backup", "--to", f"file:{site.service.folder}",
        *options,
    )  # fmt: skip
    assert status == 0, errors
    await site.service.start()


@pytest.mark.parametrize("accepts_newer", [False, True])
async def test_restore_takes_back_what_it_lost_unless_it_accepts_newer(
    site: Site, shell: Shell, accepts_newer: bool
) -> None:
    for name in ("kept", "changed", "removed"):
        await site.push({"n": 1}, doc(name))
    await back_up(site, shell)
    site.clock.now_ms += DAY_MS
    async with site.device("laptop") as laptop, site.device() as phone:
        await asyncio.gather(laptop.synced(), phone.synced())
        laptop.put(doc("changed"), {"n": 2})
        laptop.put(doc("created"), {"n": 2})
        laptop.delete(doc("removed"))
        laptop.append(LOG, {"n": 2})
        await laptop.synced()
    async with site.device() as phone:
        await phone.synced()
        before = held(phone)
        assert before == await stored(site)
    site.clock.now_ms += DAY_MS
    await restore(site, shell, *(["--accept-newer"] if accepts_newer else []))
    restored = {name: {"n": 1} for name in ("kept", "changed", "removed")}
    assert await stored(site) == restored
    async with site.device() as phone:
        await phone.synced()
        expected = before if accepts_newer else restored
        assert held(phone) == await stored(site) == expected
        assert (phone.status.unsent, phone.status.rejected) == (0, [])


async def test_replica_does_not_undo_what_was_written_after_a_restore(site: Site, shell: Shell) -> None:
    await site.push({"n": 1})
    await back_up(site, shell)
    site.clock.now_ms += DAY_MS
    await site.push({"n": 2})
    async with site.device() as phone:
        await phone.synced()
    site.clock.now_ms += DAY_MS
    await restore(site, shell, "--accept-newer")
    await site.push({"n": 3})
    async with site.device() as phone:
        await phone.synced()
        assert phone.get(DOC) == {"n": 3} == await site.pull()


async def test_edit_made_while_a_version_is_sent_back_is_kept(site: Site, shell: Shell) -> None:
    await site.push({"n": 1})
    await back_up(site, shell)
    site.clock.now_ms += DAY_MS
    await site.push({"n": 2})
    async with site.device() as phone:
        await phone.synced()
    site.clock.now_ms += DAY_MS
    await restore(site, shell, "--accept-newer")
    answered = asyncio.Event()
    arrived = site.proxy.delay("POST", until=answered)
    async with site.device() as phone:
        await arrived.wait()
        await site.push({"n": 1, "theirs": 1})
        phone.put(DOC, {"n": 2, "mine": 1})
        answered.set()
        await phone.synced()
        assert phone.get(DOC) == {"n": 2, "mine": 1, "theirs": 1} == await site.pull()


@pytest.mark.usefixtures("hasty_erasures")
async def test_replica_sends_nothing_back_that_was_erased(site: Site, shell: Shell) -> None:
    """The operator erases again after the restore, as the page says."""
    await back_up(site, shell)
    site.clock.now_ms += DAY_MS
    for name in ("erased", "kept"):
        await site.push({"n": 1}, doc(name))
    async with site.device() as phone:
        await phone.synced()
    site.clock.now_ms += DAY_MS
    await restore(site, shell, "--accept-newer")
    await site.service.app.eraser.run(EraseRequest("key", doc("erased")))
    async with site.device() as phone:
        await phone.synced()
        assert held(phone) == {"kept": {"n": 1}} == await stored(site)
        assert (phone.status.unsent, phone.status.rejected) == (0, [])


@pytest.mark.usefixtures("hasty_erasures")
async def test_erasure_while_a_replica_is_away_reaches_it(site: Site) -> None:
    for name in ("erased", "kept"):
        await site.push({"n": 1}, doc(name))
    async with site.device() as phone:
        phone.append(LOG, {"n": 1})
        await phone.synced()
    await site.service.app.eraser.run(EraseRequest("key", doc("erased")))
    await site.service.app.eraser.run(EraseRequest("key", LOG))
    async with site.device() as phone:
        await phone.synced()
        assert held(phone) == {"kept": {"n": 1}} == await stored(site)
        assert tail_of(phone) == []


async def test_replica_begins_anew_when_rights_have_grown(site: Site) -> None:
    async with site.client() as owner:
        access = await owner.push(f"{SPACE}/_access", {"owner": ME, "members": []})
        await owner.push(PLAN, {"n": 1})
        async with site.device(keys=SUBJECT, collections=PLANS) as phone:
            await phone.synced()
            assert phone.get(PLAN) is None
            access = await owner.push(f"{SPACE}/_access", {"owner": ME, "members": [MEMBER]}, access.hash)
            await phone.synced()
            assert phone.get(PLAN) == {"n": 1}


async def test_member_who_comes_back_receives_what_was_missed(site: Site) -> None:
    async with site.client() as owner:
        members = {"owner": ME, "members": [MEMBER]}
        access = await owner.push(f"{SPACE}/_access", members)
        plan = await owner.push(PLAN, {"n": 1})
        async with site.device(keys=SUBJECT, collections=PLANS) as phone:
            await phone.synced()
            access = await owner.push(f"{SPACE}/_access", {"owner": ME, "members": []}, access.hash)
            await phone.synced()
            await owner.push(PLAN, {"n": 2}, plan.hash)
            await phone.synced()
            await owner.push(f"{SPACE}/_access", members, access.hash)
            await phone.synced()
            assert phone.get(PLAN) == {"n": 2}


async def test_edit_without_the_right_to_it_waits_until_there_is_one(site: Site) -> None:
    async with site.client() as owner:
        access = await owner.push(f"{SPACE}/_access", {"owner": ME, "members": [MEMBER]})
        await owner.push(PLAN, {"n": 1})
        async with site.device(keys=SUBJECT, collections=PLANS) as phone:
            await phone.synced()
        access = await owner.push(f"{SPACE}/_access", {"owner": ME, "members": []}, access.hash)
        async with site.device(keys=SUBJECT, collections=PLANS) as phone:
            phone.put(PLAN, {"n": 2})
            await phone.synced()
            (rejected,) = phone.status.rejected
            assert (rejected.key, rejected.data) == (PLAN, {"n": 2})
            assert isinstance(rejected.error, Forbidden)
            assert await site.pull(PLAN) == {"n": 1}
            await owner.push(f"{SPACE}/_access", {"owner": ME, "members": [MEMBER]}, access.hash)
            phone.retry(PLAN)
            await phone.synced()
            assert (phone.get(PLAN), phone.status.rejected) == ({"n": 2}, [])
    assert await site.pull(PLAN) == {"n": 2}


async def test_new_owner_of_a_space_receives_the_members_that_were_hidden(site: Site) -> None:
    async with site.client() as owner:
        access = await owner.push(f"{SPACE}/_access", {"owner": ME, "members": [MEMBER]})
        await owner.push(PLAN, {"n": 1, "price": 2})
        async with site.device(keys=SUBJECT, collections=PLANS) as phone:
            await phone.synced()
            assert phone.get(PLAN) == {"n": 1}
        await owner.push(f"{SPACE}/_access", {"owner": MEMBER, "members": []}, access.hash)
    async with site.device(keys=SUBJECT, collections=PLANS) as phone:
        await phone.synced()
        assert phone.get(PLAN) == {"n": 1, "price": 2}


async def test_sealed_documents_are_merged_by_devices_and_closed_to_the_server(site: Site) -> None:
    sealing = {"docs": UnlockedKeyring(1, {1: bytes(32)})}
    async with (
        site.device("phone", sealing=sealing) as phone,
        site.device("laptop", sealing=sealing) as laptop,
    ):
        phone.put(DOC, {"n": 1})
        await phone.synced()
        await laptop.synced()
        assert laptop.get(DOC) == {"n": 1}
        site.leave()
        phone.put(DOC, {"n": 1, "phone": 1})
        laptop.put(DOC, {"n": 1, "laptop": 1})
        site.proxy.reset()
        for _ in range(2):
            await asyncio.gather(phone.synced(), laptop.synced())
        assert phone.get(DOC) == laptop.get(DOC) == {"n": 1, "phone": 1, "laptop": 1}
    assert (await site.pull()).keys() == {"_encrypted", "_epoch"}


async def test_changes_of_two_replicas_reach_each_other_while_both_are_online(site: Site) -> None:
    async with site.device("phone") as phone, site.device("laptop") as laptop:
        await asyncio.gather(phone.synced(), laptop.synced())
        phone.put(DOC, {"n": 1})
        async for key in laptop.changes():
            assert key == DOC
            if laptop.get(DOC) == {"n": 1}:
                break
