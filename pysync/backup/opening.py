"""Opens the backup that a URL names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pysync import config
from pysync.backup.repository import Repository
from pysync.backup.target import open_backup_target
from pysync.concurrency import closing

if TYPE_CHECKING:
    from pysync.backup.encryption import BackupKey


@asynccontextmanager
async def open_backup(url: str, key_file: str | None, *, create: bool = False) -> AsyncIterator[Repository]:
    """Yield the backup at `url`, with the key in a file if it is encrypted. `create` begins one if nothing
    lies there. Raises ValueError and StoreUnavailable."""
    key = None if key_file is None else await asyncio.to_thread(_read_key, key_file)
    if url.partition(":")[0] not in ("file", "s3"):
        raise ValueError(f"{url}: a backup lies in file:DIR or s3://BUCKET/PREFIX")
    place = config.parse({"version": 1, "store": url}).store
    async with closing(open_backup_target(place, create=create)) as target:
        try:
            repository = await Repository.open(target, key, create=create)
        except ValueError as error:
            raise type(error)(f"{url}: {error}") from None
        yield repository


def _read_key(name: str) -> "BackupKey":
    from pysync.backup.encryption import BackupKey

    try:
        return BackupKey.parse(Path(name).read_bytes())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
