"""A replica without a network: edits are local, immediate and on the disk, and the file knows its owner."""

import asyncio
import errno
import itertools
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.clients import ISSUER, STRANGER
from support.faulty_disk import mounted
from support.python_process import WITH_HELPERS

from pysync.client import Client, Replica, ReplicaFileError

AWAY = "http://127.0.0.1:9"
"""An address at which nobody listens."""


def replica(path: Path, **options: Any) -> Replica:
    return Replica(path, Client(AWAY, keys=ISSUER), {"notes": {}}, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


async def test_edits_are_seen_at_once_and_after_a_restart(path: Path) -> None:
    async with replica(path) as first:
        first.put("notes/a", {"n": 1, "é": [1.5, None]})
        first.put("/push/notes/b", {"n": 1})
        first.put("notes/b", {"n": 2})
        first.put("notes/c", {"n": 3})
        first.delete("notes/c")
        first.append("log/l", {"text": "hi"})
        assert first.get("notes/a") == {"n": 1, "é": [1.5, None]}
    async with replica(path) as second:
        assert second.get("notes/a") == {"n": 1, "é": [1.5, None]}
        assert second.get("/pull/notes/b") == {"n": 2}
        assert second.get("notes/c") is None
        assert second.keys() == ["log/l", "notes/a", "notes/b"]
        assert second.keys("notes/") == ["notes/a", "notes/b"]
        assert second.status.unsent == 3
        assert [element.data for element in second.tail("log/l", 5)] == [{"text": "hi"}]


async def test_data_that_is_returned_is_a_copy(path: Path) -> None:
    async with replica(path) as opened:
        data = {"items": [1]}
        opened.put("notes/a", data)
        data["items"].append(2)
        found = opened.get("notes/a")
        assert found == {"items": [1]}
        found["items"].append(3)
        assert opened.get("notes/a") == {"items": [1]}


@pytest.mark.parametrize("data", [{"n": float("nan")}, {"n": float("inf")}])
async def test_what_json_cannot_hold_is_rejected_at_once(path: Path, data: dict[str, Any]) -> None:
    async with replica(path) as opened:
        for edit in (opened.put, opened.append):
            with pytest.raises(ValueError, match="JSON"):
                edit("notes/a", data)
        assert (opened.get("notes/a"), opened.status.unsent) == (None, 0)


async def test_unsent_appends_are_the_end_of_the_tail_in_their_order(path: Path) -> None:
    times = itertools.count(10)
    async with replica(path, now_ms=lambda: next(times)) as opened:
        for n in range(3):
            opened.append("log/l", {"n": n})
        found = opened.tail("log/l", 2)
    assert [(element.data, element.author_pubkey) for element in found] == [
        ({"n": 1}, None),
        ({"n": 2}, None),
    ]
    assert 10 < found[0].ts_ms < found[1].ts_ms


async def test_changes_yields_each_key_once_until_the_replica_is_closed(path: Path) -> None:
    async with replica(path) as opened:
        opened.put("notes/before", {})
        changes = opened.changes()
        for key in ("notes/a", "notes/b", "notes/a"):
            opened.put(key, {"n": 1})
        assert [await anext(changes), await anext(changes)] == ["notes/a", "notes/b"]
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        opened.delete("notes/a")
        assert await waiting == "notes/a"
        opened.append("log/l", {})
    assert [key async for key in changes] == ["log/l"]


async def test_file_of_another_caller_server_or_namespace_is_not_opened(path: Path) -> None:
    async with replica(path):
        pass
    for client in (
        Client(AWAY, keys=STRANGER),
        Client("http://127.0.0.1:10", keys=ISSUER),
        Client(AWAY, keys=ISSUER, namespace="acme"),
        Client(AWAY),
    ):
        with pytest.raises(ReplicaFileError, match="is a replica of"):
            await Replica(path, client, {"notes": {}}).__aenter__()
    async with replica(path):
        pass


async def test_file_is_open_in_one_replica_at_a_time(path: Path) -> None:
    async with replica(path):
        with pytest.raises(ReplicaFileError, match="open in another replica"):
            await replica(path).__aenter__()
        script = f"""if True:
            import asyncio
            from pysync.client import Client, Replica
            asyncio.run(Replica({str(path)!r}, Client({AWAY!r}), {{}}).__aenter__())
        """
        ran = subprocess.run(
            [sys.executable, "-c", script], env=WITH_HELPERS, capture_output=True, text=True, check=False
        )
        assert "open in another replica" in ran.stderr
    async with replica(path):
        pass


@pytest.mark.parametrize("make", ["database", "text"])
async def test_other_files_are_left_alone(path: Path, make: str) -> None:
    if make == "database":
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE setting (name, value)")
        database.execute("PRAGMA user_version = 7")
        database.close()
    else:
        path.write_text("no database at all, however long it may be" * 100)
    with pytest.raises(ReplicaFileError):
        await replica(path).__aenter__()
    if make == "text":
        assert path.read_text().startswith("no database")


async def test_file_is_readable_by_its_owner_alone(path: Path) -> None:
    async with replica(path) as opened:
        opened.put("notes/a", {"n": 1})
        for name in os.listdir(path.parent):
            assert stat.S_IMODE((path.parent / name).stat().st_mode) == 0o600


async def test_a_full_disk_rejects_an_edit_and_loses_none(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 1, "tmpfs") as disk:
        async with replica(disk.path / "app.db") as opened:
            opened.put("notes/a", {"n": 1})
            disk.fill()

            def edit_on() -> None:
                while True:
                    opened.put("notes/a", {"n": 2, "text": "x" * 10_000})
                    opened.append("log/l", {"text": "x" * 10_000})

            with pytest.raises(OSError, match="the disk is full") as caught:
                edit_on()
            assert caught.value.errno == errno.ENOSPC
            kept, count = opened.get("notes/a"), len(opened.tail("log/l", 100))
            (disk.path / "filler").unlink()
            opened.put("notes/b", {"n": 3})
        async with replica(disk.path / "app.db") as opened:
            assert (opened.get("notes/a"), opened.get("notes/b")) == (kept, {"n": 3})
            assert len(opened.tail("log/l", 100)) == count
