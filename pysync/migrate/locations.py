"""The stores that arguments of `pysync copy` name: by a URL, or by a configuration file that has one."""

from pathlib import Path
from typing import Final

from pysync import config
from pysync.config import StoreConfig
from pysync.migrate.starfish_folder import FolderSource
from pysync.store import ReadableStore, Store, open_store

Location = StoreConfig | Path
"""A store, or a folder of plain files."""

_DATABASE: Final = "pysync.db"


def parse_location(text: str) -> Location:
    """Return the location that `text` names. Raises ValueError or ConfigError if it names none."""
    kind, _, rest = text.partition(":")
    if kind == "folder" and rest:
        return Path(rest)
    if kind in ("memory", "file", "s3"):
        return config.parse({"version": 1, "store": text}).store
    if Path(text).suffix in (".json", ".yaml", ".yml", ".toml"):
        return config.load(text).store
    raise ValueError(f"{text}: name file:DIR, s3://BUCKET/PREFIX, folder:DIR or a configuration file")


async def open_source(location: Location) -> ReadableStore:
    """Open the location to copy from. It must exist; nothing is created. Raises ValueError and
    StoreUnavailable."""
    if isinstance(location, Path):
        return _folder(location)
    check_exists(location.url)
    return await open_store(location)


async def open_target(location: Location) -> Store:
    """Open the location to copy to, and create it if it is missing. Raises ValueError and
    StoreUnavailable."""
    if isinstance(location, Path):
        raise ValueError(f"folder:{location} can only be copied from")
    return await open_store(location)


def _folder(root: Path) -> FolderSource:
    if (root / _DATABASE).exists():
        raise ValueError(f"folder:{root} is a store: name it file:{root}")
    return FolderSource(root)


def check_exists(url: str) -> None:
    """Raise ValueError if a `file:` store does not exist yet."""
    kind, _, folder = url.partition(":")
    if kind == "file" and not (Path(folder) / _DATABASE).exists():
        advice = f"; a folder of plain files is folder:{folder}" if Path(folder).is_dir() else ""
        raise ValueError(f"{url}: there is no store{advice}")
