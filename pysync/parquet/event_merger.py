"""Merges the Parquet files of many batches of events into one.

Importing this module imports pyarrow. See docs/reference/protocol.md#events.
"""

import os
import tempfile
from collections.abc import Sequence
from typing import IO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from pysync.parquet import EVENT_COLUMNS

SCHEMA: Final = pa.schema([pa.field(name, pa.string(), nullable=False) for name in EVENT_COLUMNS])

ROW_GROUP_BYTES: Final = 33_554_432
ROW_GROUP_ROWS: Final = 122_880
"""A row group is written when it has this many bytes (in memory) or rows. One thread of DuckDB reads it."""


class ParquetMerger:
    """One file with the rows of others, in the order in which they are appended. It grows on disk, in the
    folder for temporary files; only one row group and the file that is being appended are in memory. Its
    methods block, so call them in a thread."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self._writer = pq.ParquetWriter(self._file, SCHEMA, compression="zstd", store_schema=False)
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
        self.rows = 0

    def append_files(self, bodies: Sequence[bytes]) -> list[str | None]:
        """Append the rows of each file, all or none. Returns the reason for each file that is not appended,
        None for the others."""
        return [self._append(body) for body in bodies]

    def finish(self) -> None:
        """Write the remaining rows. Afterwards `read` returns the complete file."""
        self._flush()
        self._writer.close()
        self._file.flush()

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of the finished file; none past its end."""
        return os.pread(self._file.fileno(), size, start)

    def close(self) -> None:
        """Close and delete the temporary file."""
        self._writer.close()
        self._file.close()

    def _append(self, body: bytes) -> str | None:
        try:
            file = pq.ParquetFile(pa.BufferReader(body), pre_buffer=False)
            if not file.schema_arrow.equals(SCHEMA):
                return "it has other columns"
            groups = range(file.metadata.num_row_groups)
            if len(groups) == 1:
                self._add(file.read_row_group(0, use_threads=False))
                return None
            for at in groups:
                file.read_row_group(at)
            for at in groups:
                self._add(file.read_row_group(at))
        except (pa.ArrowException, OSError, ValueError) as error:
            return f"it cannot be read: {error}"
        return None

    def _add(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending_rows:
            table = pa.concat_tables(self._pending)
            self._writer.write_table(table, row_group_size=table.num_rows)
            self.rows += table.num_rows
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0
