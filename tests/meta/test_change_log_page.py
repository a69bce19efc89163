"""The worked example of docs/explanation/change-log.md is what the change log does."""

import re
import sqlite3
from pathlib import Path

from pysync.changelog import Change, Retention, change_id
from pysync.errors import StoreUnavailable
from pysync.sqlite.changelog import ADD_EPOCHS_SQL, ADD_ORIGIN_SQL, TABLE, SqliteChangeLog
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import Schema, open_database

EPOCH = "0a1b2c3d"
PAGE = Path(__file__).parent.parent.parent / "docs/explanation/change-log.md"


def steps() -> list[tuple[int, list[int], int, dict[int, str]]]:
    """Of each row of the table: the sentinel, the changes behind it, the newest id, the answer by cursor."""
    found = []
    for row in PAGE.read_text().split("## A worked example")[1].split("\n## ")[0].splitlines():
        if match := re.fullmatch(r"\| .+ \| \[(\d+)\]([\d ]*) \| (\d+) \| (.+) \| (.+) \|", row):
            sentinel, rest, newest, at_102, at_104 = match.groups()
            found.append(
                (int(sentinel), [int(id_) for id_ in rest.split()], int(newest), {102: at_102, 104: at_104})
            )
    return found


async def test_change_log_answers_each_resume_as_the_page_says(tmp_path: Path) -> None:
    schema = Schema((TABLE, ADD_ORIGIN_SQL, ADD_EPOCHS_SQL))
    database = open_database(tmp_path / "log.db", schema, "NORMAL")
    writer = GroupCommit(database, StoreUnavailable)
    log = SqliteChangeLog(SnapshotReader(database, StoreUnavailable), writer, lambda: 0, Retention())

    def rewrite(cursor: sqlite3.Cursor, ids: list[int]) -> None:
        cursor.execute("DELETE FROM change")
        cursor.execute("UPDATE epoch SET tag = ?", (EPOCH,))
        cursor.executemany("INSERT INTO change VALUES(?, 0, x'', '', '')", [(id_,) for id_ in ids])

    rows = steps()
    assert len(rows) == 8
    for sentinel, changes, newest, answers in rows:
        await writer.submit(rewrite, [sentinel, *changes])
        assert await log.last_id() == change_id(newest, EPOCH)
        for cursor, said in answers.items():
            after = await log.read(change_id(cursor, EPOCH), 100)
            if said == "reset":
                assert after is None
            else:
                expected = [] if said == "nothing yet" else [int(id_) for id_ in said.split(", ")]
                assert after == [(change_id(id_, EPOCH), Change(b"")) for id_ in expected]
    await writer.close()
