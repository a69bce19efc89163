"""The SQL that puts documents."""

from typing import Final, NamedTuple, Self


class PutStatements(NamedTuple):
    """The statements that put a document, for each precondition and over a file."""

    absent: str
    any: str
    etag: str
    over_file: str

    @classmethod
    def of(cls, *columns: str) -> Self:
        """Return the statements that write these columns. A row that is not counted has no owner."""
        insert = f"""
            INSERT INTO object({", ".join(columns)}, parent, name) VALUES({"?, " * len(columns)}?, ?)
            ON CONFLICT(parent, name) DO """
        excluded = [f"{column} = excluded.{column}" for column in columns]
        values = [f"{column} = ?" for column in columns]
        if "owner" not in columns:
            excluded.append("owner = NULL")
            values.append("owner = NULL")
        update = f"UPDATE object SET {', '.join(values)}"  # noqa: S608
        key = "WHERE parent = ? AND name = ?"
        return cls(
            f"{insert} NOTHING",
            f"{insert} UPDATE SET {', '.join(excluded)} WHERE sha256 IS NULL",
            f"{update} {key} AND etag = ? AND sha256 IS NULL",
            f"{update}, sha256 = NULL, mtime_ns = NULL, inode = NULL {key}",
        )


PUT: Final = PutStatements.of("etag", "content_type", "modified_ms", "body")
PUT_COUNTED: Final = PutStatements.of(
    "etag", "content_type", "modified_ms", "body", "size", "owner", "elements"
)


def _append(*columns: str) -> str:
    """Return the statement that stores a document behind all others of its folder. Its parameters are these
    columns, the folder, and the time and the suffix of the name."""
    folder, at_ms, suffix = (f"?{len(columns) + n}" for n in (1, 2, 3))
    return f"""
        INSERT INTO object({", ".join(columns)}, parent, name)
        SELECT {", ".join(f"?{n + 1}" for n in range(len(columns)))}, {folder},
            printf('%016d00000000', max({at_ms}, 1 + coalesce((
                SELECT CAST(substr(max(name), 1, 16) AS INTEGER) FROM object WHERE parent = {folder}), 0)))
            || {suffix}"""  # noqa: S608


APPEND: Final = _append("etag", "content_type", "modified_ms", "body")
APPEND_COUNTED: Final = _append("etag", "content_type", "modified_ms", "body", "size", "owner", "elements")
